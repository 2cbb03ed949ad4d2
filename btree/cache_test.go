package btree

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
)

// A cached node leads every key to where the node itself leads it, and the search in
// nodes finds what a walk over their entries finds: few different bytes, so that
// keys begin alike, end in zeros, and are beginnings of one another.
func TestDescentsThroughTheCacheGoWhereNodesSay(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 9))
	word := func(lead string, most int) []byte {
		b := []byte(lead)
		for range rng.IntN(most) {
			b = append(b, "\x00\x00ab\xff"[rng.IntN(5)])
		}
		return b
	}
	rounds := 400
	if testing.Short() {
		t.Log("-short: fewer rounds")
		rounds = 100
	}
	for round := range rounds {
		lead := []string{"", "k", "key:00000000", "\x00\x00\x00\x00\x00\x00\x00\x00\x00"}[round%4]
		most := []int{4, 12, 30}[round%3]
		var keys [][]byte
		for range 1 + rng.IntN(70) {
			keys = append(keys, append(word(lead, most), 'x'))
		}
		slices.SortFunc(keys, bytes.Compare)
		keys = slices.CompactFunc(keys, bytes.Equal)
		for _, bounded := range []bool{false, true} {
			n := node{level: 1, class: proto.Class(7), stamp: 1}
			if bounded {
				n.low, n.high, n.right = []byte(lead), append([]byte(lead), 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), Ref{Addr: proto.MakeAddr(1, 1<<21), Incarnation: proto.MakeIncarnation(1, 1)}
				if lead == "" {
					n.low = nil
				}
			}
			n.entries = append(n.entries, entry{key: n.low, child: Ref{Addr: proto.MakeAddr(1, 1<<20), Incarnation: proto.MakeIncarnation(1, 1)}})
			for i, k := range keys {
				if bounded && bytes.Compare(k, n.high) >= 0 {
					continue
				}
				n.entries = append(n.entries, entry{key: k, child: Ref{Addr: proto.MakeAddr(1, 1<<20+uint32(i+1)*4096), Incarnation: proto.MakeIncarnation(1, uint64(i+1))}})
			}
			v, err := open(n.encode(nil, 0))
			require.NoError(t, err)
			plain, cached := page{view: v}, page{view: v, cached: true}
			cached.indexed()
			probes := append(slices.Clone(keys), []byte(lead))
			for range 100 {
				probes = append(probes, word(lead, most), word("", 20))
			}
			for _, k := range probes {
				for _, before := range []bool{false, true} {
					pr := probe{key: k, before: before}
					if v.place(pr) != 0 {
						continue
					}
					want := 0
					for i := 1; i < len(n.entries); i++ {
						if c := bytes.Compare(n.entries[i].key, k); c < 0 || c == 0 && !before {
							want = i
						}
					}
					i, child, ok := plain.childOf(pr)
					require.True(t, ok)
					require.Equal(t, want, i, "search for %q, before %v, in %q", k, before, keys)
					j, kid, ok := cached.childOf(pr)
					require.True(t, ok)
					require.Equal(t, want, j, "route of %q, before %v, in %q", k, before, keys)
					require.Equal(t, child, kid)
				}
			}
		}
	}
}
