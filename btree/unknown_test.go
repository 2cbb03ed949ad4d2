package btree

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/slab"
)

// lostStore answers one Update, which it has made, with an unknown outcome.
type lostStore struct {
	*memStore
	lose    error
	updates int
}

func (s *lostStore) Update(ref Ref, f func(old []byte) ([]byte, error)) error {
	s.updates++
	err := s.memStore.Update(ref, f)
	if err == nil && s.lose != nil {
		err, s.lose = s.lose, nil
	}
	return err
}

// TestUnknownOutcomeIsNotRepeated: a change whose outcome is unknown is made at most once,
// also where the cause is that the leaf has been freed since.
func TestUnknownOutcomeIsNotRepeated(t *testing.T) {
	for _, lose := range []error{slab.ErrUnknown, fmt.Errorf("%w (%w)", slab.ErrUnknown, slab.ErrFreed)} {
		s := &lostStore{memStore: newMemory().store(t)}
		sh, err := Make(s, Config{})
		require.NoError(t, err)
		p := NewProgram(sh, s)
		for name, change := range map[string]func() error{
			"put":    func() error { _, err := p.Put([]byte("k"), []byte("v"), Cond{}); return err },
			"delete": func() error { return p.Delete([]byte("k"), Cond{}) },
			"group": func() error {
				w := Write{Key: []byte("k"), Edit: func(old []byte, _ uint64) ([]byte, bool, error) { return append(old, 'x'), false, nil }}
				given := false
				p.WriteGroup(sh.Root(), func() *Write {
					if given {
						return nil
					}
					given = true
					return &w
				})
				require.False(t, w.Alone)
				return w.Err
			},
		} {
			_, err := p.Put([]byte("k"), []byte("old"), Cond{})
			require.NoError(t, err)
			s.lose, s.updates = lose, 0
			require.ErrorIs(t, change(), slab.ErrUnknown, name)
			require.Equal(t, 1, s.updates, name)
		}
	}
}
