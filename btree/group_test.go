package btree

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// againStore runs the callback of one Update twice, as a store does whose commit has met another
// one: the second time on what between has made of the object.
type againStore struct {
	*memStore
	between func()
}

func (s *againStore) Update(ref Ref, f func(old []byte) ([]byte, error)) error {
	if between := s.between; between != nil {
		s.between = nil
		old, err := s.Read(ref, nil)
		if err == nil {
			_, _ = f(old)
			between()
		}
	}
	return s.memStore.Update(ref, f)
}

// TestWritesBehindOneThatIsNotMade: the leaf changes before the commit of a group, so that its first
// write has no room, or its condition does not hold. A write behind it is not made, so the writes of
// one caller keep their order.
func TestWritesBehindOneThatIsNotMade(t *testing.T) {
	m := newMemory()
	s := &againStore{memStore: m.store(t)}
	sh, err := Make(s, Config{})
	require.NoError(t, err)
	p, other := NewProgram(sh, s), NewProgram(sh, m.store(t))
	put := func(key string, n int) func() {
		return func() {
			_, err := other.Put([]byte(key), bytes.Repeat([]byte{'v'}, n), Cond{})
			require.NoError(t, err)
		}
	}
	put("full", 100)()
	refuse := func([]byte, uint64) ([]byte, bool, error) { return nil, false, errors.New("refused") }
	first, version := []byte("a"), uint64(0)
	for name, c := range map[string]struct {
		write   func() Write
		between func()
		behind  bool
		made    bool // the second write
	}{
		"no room":                  {func() Write { return Write{Key: first, Value: make([]byte, 200)} }, put("full", 200), true, false},
		"no room, not behind":      {func() Write { return Write{Key: first, Value: make([]byte, 200)} }, put("full", 200), false, true},
		"condition":                {func() Write { return Write{Key: first, Value: []byte("x"), Cond: IfVersion(version)} }, put("a", 2), true, false},
		"condition, not behind":    {func() Write { return Write{Key: first, Value: []byte("x"), Cond: IfVersion(version)} }, put("a", 2), false, true},
		"refused by Edit":          {func() Write { return Write{Key: first, Edit: refuse} }, put("a", 2), true, true},
		"nothing is in the way":    {func() Write { return Write{Key: first, Value: []byte("x")} }, put("a", 2), true, true},
		"the leaf has not changed": {func() Write { return Write{Key: first, Value: []byte("x")} }, func() {}, true, true},
	} {
		if err := other.Delete([]byte("b"), Cond{}); err != nil {
			require.ErrorIs(t, err, ErrNoKey)
		}
		put("a", 1)()
		put("full", 100)()
		_, version, err = other.Get(first, nil)
		require.NoError(t, err)
		for i := 0; ; i++ { // a write of 200 B has room, until 100 B more are there
			root, err := s.Read(sh.Root(), nil)
			require.NoError(t, err)
			v, err := parse(root)
			require.NoError(t, err)
			if p.limits.Room-v.filled() < 300 {
				break
			}
			put(fmt.Sprint("fill", i), 10)()
		}
		ws := []Write{c.write(), {Key: []byte("b"), Value: []byte("x"), Behind: c.behind}, {Key: []byte("b"), Value: []byte("y"), Behind: c.behind}}
		s.between = c.between
		at := 0
		p.WriteGroup(sh.Root(), func() *Write {
			if at == len(ws) {
				return nil
			}
			at++
			return &ws[at-1]
		})
		require.Nil(t, s.between, name)
		_, _, err = other.Get([]byte("b"), nil)
		if !c.made {
			require.ErrorIs(t, err, ErrNoKey, name)
			require.True(t, ws[1].Alone && ws[2].Alone, name)
			continue
		}
		require.NoError(t, err, name)
		require.False(t, ws[1].Alone || ws[2].Alone, name)
		require.Zero(t, ws[1].Base, name)
		require.Equal(t, ws[1].Version, ws[2].Base, name)
	}
}
