package pmem

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What the ledger says of each way to forget something: an order of write-back and fence that the rule of
// Persist allows keeps the store, every other may lose it.
func TestLedgerFindsWhatIsForgotten(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(u *unit, mem []byte)
		keeps bool
	}{
		"all":                  {func(u *unit, mem []byte) { mem[64] = 1; u.writeBack(mem, 64, 1); u.fence() }, true},
		"no write-back":        {func(u *unit, mem []byte) { mem[64] = 1; u.fence() }, false},
		"no fence":             {func(u *unit, mem []byte) { mem[64] = 1; u.writeBack(mem, 64, 1) }, false},
		"fence first":          {func(u *unit, mem []byte) { mem[64] = 1; u.fence(); u.writeBack(mem, 64, 1) }, false},
		"store after the line": {func(u *unit, mem []byte) { u.writeBack(mem, 64, 1); mem[64] = 1; u.fence() }, false},
		"the line before":      {func(u *unit, mem []byte) { mem[64] = 1; u.writeBack(mem, 0, 64); u.fence() }, false},
		"the end of a range":   {func(u *unit, mem []byte) { mem[64] = 1; u.writeBack(mem, 63, 2); u.fence() }, true},
		"streamed":             {func(u *unit, mem []byte) { u.stream(mem, 64, []byte{1, 0, 0, 0, 0, 0, 0, 0}); u.fence() }, true},
		"streamed, no fence":   {func(u *unit, mem []byte) { u.stream(mem, 64, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			mem := make([]byte, 256)
			l := NewLedger(mem)
			c.do(l.Flusher().unit, mem)
			require.Equal(t, c.keeps, l.Cut(None)[64] == 1)
			require.EqualValues(t, 1, l.Cut(All)[64])
		})
	}
}

// A cut takes each word for itself, by the coin, and never a part of one.
func TestCutByWords(t *testing.T) {
	mem := make([]byte, 64<<10)
	l := NewLedger(mem)
	for i := range mem {
		mem[i] = 0xff
	}
	require.NoError(t, l.Flusher().Persist(mem, 0, 128))
	image := l.Cut(Half(1))
	require.Equal(t, image, l.Cut(Half(1)), "the same coin")
	require.NotEqual(t, image, l.Cut(Half(2)))
	survived := 0
	for at := 0; at < len(image); at += 8 {
		word := [8]byte(image[at:])
		if word == [8]byte(mem) {
			survived++
		} else {
			require.Zero(t, word)
			require.GreaterOrEqual(t, at, 128)
		}
	}
	require.InDelta(t, len(image)/16, survived, float64(len(image)/80))
	flushed, needless := l.Lines()
	require.EqualValues(t, 2, flushed)
	require.Zero(t, needless)
	require.NoError(t, l.Flusher().Persist(mem, 0, 64))
	_, needless = l.Lines()
	require.EqualValues(t, 1, needless)
}
