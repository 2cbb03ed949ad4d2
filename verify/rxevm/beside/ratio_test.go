//go:build cgo && verbs

package beside

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// Compares an Update with its rounds: the same verbs are posted as bare rounds, in turn with
// Updates. It prints the figures and has no limit, like TestRatioToPerftest.
func TestRatioOfUpdate(t *testing.T) {
	if os.Getenv("RXE_DEVICE") == "" {
		t.Skip("no RDMA device: run verify/rxevm/test-rdma.sh")
	}
	p := slabtest.New(t, 1).Lane(1)
	payload := make([]byte, 100)
	ref, err := p.Alloc.Alloc(payload, alloc.Want{Replicas: 1})
	require.NoError(t, err)
	update := func() {
		_, err := p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return payload, nil })
		require.NoError(t, err)
	}
	update()
	// The same verbs without an effect: no CAS finds the value that it expects, and the WRITE
	// goes to the inactive image.
	var rounds []*rdma.Round
	p.BeforeDo = func(_ int, r *rdma.Round) {
		from := r.At(0)
		own := new(rdma.Round)
		c := own.Chain(from.To)
		for i := range from.Verbs {
			v := from.Verbs[i]
			switch v.Op {
			case rdma.CompareSwap:
				c.CAS(v.Off, ^uint64(0), 0)
			case rdma.Write:
				c.Write(v.Off, v.Buf)
			case rdma.Read:
				c.Read(v.Off, v.Buf)
			}
			if v.Fence {
				c.Fenced()
			}
		}
		rounds = append(rounds, own)
	}
	update()
	p.BeforeDo = nil
	require.Len(t, rounds, 2)
	bare := func() {
		for _, r := range rounds {
			r.Deadline = clock.In(time.Minute)
			rdma.Do(r)
			require.NoError(t, r.At(0).Err)
		}
	}
	each := 500
	if s := os.Getenv("RATIO_SAMPLES"); s != "" {
		each, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	median := func(f func()) time.Duration {
		took := make([]time.Duration, each)
		for i := range took {
			start := clock.Now()
			f()
			took[i] = time.Duration(clock.Now() - start)
		}
		slices.Sort(took)
		return took[each/2]
	}
	var whole, parts []time.Duration
	for range 7 {
		parts = append(parts, median(bare))
		whole = append(whole, median(update))
	}
	slices.Sort(whole)
	slices.Sort(parts)
	fmt.Printf("ratio: %-10s  %-13s %8v   quarry %8v   %.2f   best %v %v\n", "Update", "its 2 rounds", parts[3], whole[3], float64(whole[3])/float64(parts[3]), parts[0], whole[0])
}
