package host

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever is fenced and settled in whatever order: a session that has ended is
// never admitted again, one that nobody has ended is, and memory is bounded by the
// sessions above the floor and the live ones below it.
func TestEndedStaysEnded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const serials = 40
		var e Ended
		ended := map[uint64]bool{} // the model: one by one
		newest := uint64(0)
		serial := rapid.Uint64Range(0, serials-1)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			if rapid.Bool().Draw(t, "fence") {
				s := serial.Draw(t, "serial")
				require.Equal(t, !ended[s], e.Fence(s))
				ended[s] = true
			} else {
				next := serial.Draw(t, "next")
				live := rapid.SliceOfN(serial, 0, 6).Draw(t, "live")
				e.EndBelow(next, live)
				if next >= newest {
					newest = next
					for s := range next {
						ended[s] = ended[s] || !contains(live, s)
					}
				}
			}
			for s := range uint64(serials) {
				require.Equal(t, !ended[s], e.Admits(s), "serial %d", s)
			}
			for s := range e.fenced {
				require.GreaterOrEqual(t, s, e.floor, "Settle stands for it")
			}
		}
	})
}

func contains(list []uint64, s uint64) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
