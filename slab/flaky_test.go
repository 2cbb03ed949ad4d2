package slab_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestHazard37_LostAnswersCountOnce: connections lose chains, answers, and order
// in time; every increment that was acknowledged is there, none twice, and what
// is unknown accounts for the rest.
func TestHazard37_LostAnswersCountOnce(t *testing.T) {
	for _, replicas := range []int{1, 2, 3} {
		t.Run(fmt.Sprintf("R=%d", replicas), func(t *testing.T) {
			w := slabtest.New(t, replicas)
			sound := w.Lane(1)
			ref, err := sound.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: replicas})
			require.NoError(t, err)
			var wg sync.WaitGroup
			var mu sync.Mutex
			acked, unknown := 0, 0
			for c := range 3 {
				p := w.Lane(uint32(c + 10))
				p.Flaky(uint64(c+1), 12)
				wg.Go(func() {
					for range 150 {
						_, err := p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
							n := make([]byte, 8)
							proto.PutWord(n, 0, proto.Word(old, 0)+1)
							return n, nil
						})
						mu.Lock()
						switch {
						case err == nil:
							acked++
						case errors.Is(err, slab.ErrUnknown):
							unknown++
						default:
							t.Errorf("%v", err)
						}
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			b, _, err := sound.Lane.Read(ref, nil)
			require.NoError(t, err)
			n := int(proto.Word(b, 0))
			require.GreaterOrEqual(t, n, acked)
			require.LessOrEqual(t, n, acked+unknown)
			require.Greater(t, acked, 400)
		})
	}
}

// TestLostAnswersWhileAllocating: the same for claims, births and frees: no slab
// is handed out twice, and what was freed stays freed.
func TestLostAnswersWhileAllocating(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		w := slabtest.New(t, replicas)
		var wg sync.WaitGroup
		var mu sync.Mutex
		live := map[proto.Addr]string{}
		for c := range 3 {
			p := w.Lane(uint32(c + 10))
			p.Flaky(uint64(c+7), 15)
			wg.Go(func() {
				for i := range 120 {
					text := fmt.Sprintf("client %d object %d", c, i)
					ref, err := p.Alloc.Alloc([]byte(text), alloc.Want{Replicas: replicas})
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					if was, ok := live[ref.Addr]; ok {
						t.Errorf("%v holds %q and %q", ref, was, text)
					}
					live[ref.Addr] = text
					mu.Unlock()
					if i%2 == 0 {
						continue
					}
					mu.Lock()
					delete(live, ref.Addr)
					mu.Unlock()
					if _, _, err := p.Alloc.Free(ref); err != nil {
						t.Error(err)
						return
					}
					if _, _, err := p.Lane.Read(ref, nil); !errors.Is(err, slab.ErrFreed) {
						t.Errorf("read of a freed object: %v", err)
					}
				}
			})
		}
		wg.Wait()
		require.Len(t, live, 3*60)
	}
}

// TestBatchesLoseAnswers: WriteMany over the same connections.
func TestBatchesLoseAnswers(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		w := slabtest.New(t, replicas)
		p := w.Lane(1)
		var refs []proto.Ref
		for range 40 {
			ref, err := p.Alloc.Alloc(make([]byte, 20), alloc.Want{Replicas: replicas})
			require.NoError(t, err)
			refs = append(refs, ref)
		}
		p.Flaky(3, 6)
		errs := make([]error, len(refs))
		payloads := make([][]byte, len(refs))
		for round := range 60 {
			for i := range payloads {
				payloads[i] = fmt.Appendf(nil, "round %d %d", round, i)
			}
			p.Lane.WriteMany(refs, payloads, errs)
			for i, err := range errs {
				require.NoError(t, err, "round %d object %d", round, i)
			}
			seen := 0
			require.NoError(t, p.Lane.ReadMany(refs, func(i int, b []byte, _ slab.Info, err error) {
				require.NoError(t, err)
				require.Equal(t, string(payloads[i]), string(b))
				seen++
			}))
			require.Equal(t, len(refs), seen)
		}
	}
}
