package redis

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBothStopped stops a gateway and another one, each before each of its operations, and
// lets the first go on before the second does. The model judges the answers.
func TestBothStopped(t *testing.T) {
	r := newRig(t)
	for _, row := range []struct {
		before, first string
		second        []string
	}{
		{"HSET a f 1", "COPY a b", []string{"SETNX b v", "DEL b"}},
		{"ZADD a 1 f", "COPY a b", []string{"SETNX b v", "DEL b"}},
	} {
		t.Run(row.first+" beside "+strings.Join(row.second, ", "), func(t *testing.T) {
			for stop := 1; ; stop++ {
				over := true
				for other := 1; ; other++ {
					sc := newSchedule(t, 1)
					a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
					b.do(strings.Fields(row.before)...)
					a.start(func() { a.do(strings.Fields(row.first)...) })
					b.start(func() {
						for _, line := range row.second {
							b.do(strings.Fields(line)...)
						}
					})
					a.run(stop)
					over = over && a.done
					b.run(other)
					last := b.done
					a.run(endless)
					b.run(endless)
					a.s.tree.step, b.s.tree.step = nil, nil
					a.tidyAll()
					bad := sc.verdict(r, true)
					require.Empty(t, bad, "stopped before operations %d and %d\n%s", stop, other, sc.history())
					if last {
						break
					}
				}
				if over {
					break
				}
			}
		})
	}
}

// TestFailedBehindOthers stops a COPY before each of its operations, lets others confirm and
// remove what it has put by then, and makes an operation behind that fail. The model judges
// the answers.
func TestFailedBehindOthers(t *testing.T) {
	r := newRig(t)
	for _, before := range []string{"HSET a f 1", "ZADD a 1 f"} {
		for stop := 1; ; stop++ {
			over := false
			for more := range 8 {
				sc := newSchedule(t, 1)
				a, b := sc.add(r.trees[0]), sc.add(r.trees[1])
				b.do(strings.Fields(before)...)
				a.start(func() { a.do("COPY", "a", "b") })
				a.run(stop)
				over = a.done
				b.do("SETNX", "b", "v")
				b.do("DEL", "b")
				a.run(more)
				a.failing = 1
				a.run(endless)
				a.s.tree.step = nil
				a.tidyAll()
				bad := sc.verdict(r, true)
				require.Empty(t, bad, "stopped before operation %d, failed %d behind it\n%s", stop, more, sc.history())
			}
			if over {
				break
			}
		}
	}
}
