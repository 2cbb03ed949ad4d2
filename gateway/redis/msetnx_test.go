package redis

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMsetnxIsNotRefusedInPart stops a MSETNX before each of its operations. Another gateway
// changes the key that it has set by then, and sets the other one. The answer 0 says that
// the command has set no key, so its value must not be part of what is there.
func TestMsetnxIsNotRefusedInPart(t *testing.T) {
	r := newRig(t)
	parts := 0
	for _, change := range []string{"APPEND b x", "EXPIRE b 1000000", "RENAME b c", "SET b x", "DEL b"} {
		for stop, over := 1, false; !over; stop++ {
			sc := newSchedule(t, 1)
			a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
			var answer string
			a.start(func() { answer = a.raw("MSETNX", "a", "mine", "b", "mine") })
			a.run(stop)
			over = a.done
			b.raw(strings.Fields(change)...)
			b.raw("SETNX", "a", "other")
			a.run(endless)
			a.s.tree.step = nil
			if answer == ":0\r\n" {
				require.NotContains(t, b.dump(), "mine", "%s, stopped before operation %d", change, stop)
			} else if answer != ":1\r\n" {
				require.Equal(t, "-TRYAGAIN others kept changing the key; done in part\r\n", answer, "%s, stopped before operation %d", change, stop)
				parts++
			}
			require.Empty(t, sc.end(r))
		}
	}
	require.Positive(t, parts)
}
