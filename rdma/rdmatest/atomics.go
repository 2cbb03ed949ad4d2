package rdmatest

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// testAtomics: many lanes on the same words lose nothing.
func testAtomics(t *testing.T, p Provider) {
	b := setup(t, p)
	var lanes []*rdma.Target
	for i := range 8 {
		lanes = append(lanes, b.lane(uint64(1+i/4), uint32(i)))
	}
	CountExactly(t, lanes, 300)
}

// CountExactly lets every lane count on the same words, by FETCH_ADD and by CAS,
// and checks that no count was lost. The lanes may be of different providers:
// that shows that they share one domain of atomicity.
func CountExactly(t testing.TB, lanes []*rdma.Target, each int) {
	const added, swapped = 64, 72
	start := word(t, lanes[0], added)
	require.Equal(t, start, word(t, lanes[0], swapped))
	var done sync.WaitGroup
	var failed atomic.Int64
	for _, to := range lanes {
		done.Go(func() {
			var r rdma.Round
			guess := uint64(0)
			for n := 0; n < each; {
				r.Reset()
				c := r.Chain(to)
				c.CAS(swapped, guess, guess+1)
				if n == 0 {
					c.Verbs[0].Expect = 1 << 60 // learn the value first
				}
				rdma.Do(&r)
				if c = r.At(0); c.Err != nil {
					failed.Add(1)
					return
				}
				if old := c.Verbs[0].Old; old != guess || n == 0 {
					guess = old
					if n == 0 {
						n++
					}
					continue
				}
				guess++
				n++
				r.Reset()
				r.Chain(to).FetchAdd(added, 1)
				rdma.Do(&r)
				if r.Err() != nil {
					failed.Add(1)
					return
				}
			}
		})
	}
	done.Wait()
	require.Zero(t, failed.Load())
	want := start + uint64(len(lanes)*(each-1))
	require.Equal(t, want, word(t, lanes[0], swapped), "by CAS")
	require.Equal(t, want, word(t, lanes[0], added), "by FETCH_ADD")
}

// testReleaseByCAS: hazard 6: one word, taken and released by CAS only, is never
// held by two; WRITEs to the words beside it, and to parts of them, change nothing.
func testReleaseByCAS(t *testing.T, p Provider) {
	b := setup(t, p)
	var held, twice atomic.Int64
	var done sync.WaitGroup
	var stop atomic.Bool
	for i := range 2 {
		to := b.lane(10, uint32(i))
		done.Go(func() { // neighbours: 7 bytes and 9 bytes around the word at 64
			for n := 0; !stop.Load(); n++ {
				one(to, func(c *rdma.Chain) { c.Write(57, pattern(7, byte(n))); c.Write(72, pattern(9, byte(n))) })
			}
		})
	}
	var takers sync.WaitGroup
	for i := range 4 {
		to, me := b.lane(1, uint32(i)), uint64(i+1)
		takers.Go(func() {
			for n := 0; n < 100; {
				if c := one(to, func(c *rdma.Chain) { c.CAS(64, 0, me) }); c.Verbs[0].Old != 0 || c.Err != nil {
					continue
				}
				if held.Add(1) != 1 {
					twice.Add(1)
				}
				n++
				held.Add(-1)
				if c := one(to, func(c *rdma.Chain) { c.CAS(64, me, 0) }); c.Verbs[0].Old != me {
					twice.Add(1)
				}
			}
		})
	}
	takers.Wait()
	stop.Store(true)
	done.Wait()
	require.Zero(t, twice.Load())
}

// testTearing: hazard 24: a READ may see a mixture of WRITEs, but never within 8
// aligned bytes; unaligned WRITEs merge with their neighbours.
func testTearing(t *testing.T, p Provider) {
	b := setup(t, p)
	const size = 8192
	var stop atomic.Bool
	var writers sync.WaitGroup
	for i := range 2 {
		to := b.lane(1, uint32(i))
		writers.Go(func() {
			buf := make([]byte, size)
			var r rdma.Round
			for n := uint64(i); !stop.Load(); n += 2 {
				for j := range size / 8 {
					// Both halves of a word say the same.
					binary.LittleEndian.PutUint64(buf[8*j:], (n&0xffffffff)<<32|n&0xffffffff)
				}
				r.Reset()
				r.Chain(to).Write(0, buf)
				rdma.Do(&r)
			}
		})
	}
	reader := b.lane(2, 0)
	torn := 0
	var buf [size]byte
	for range 1500 {
		require.NoError(t, one(reader, func(c *rdma.Chain) { c.Read(0, buf[:]) }).Err)
		for j := range size / 8 {
			if w := binary.LittleEndian.Uint64(buf[8*j:]); w>>32 != w&0xffffffff {
				torn++
			}
		}
	}
	stop.Store(true)
	writers.Wait()
	require.Zero(t, torn, "words torn")

	// Two lanes own the odd and the even bytes of one stretch: each finds its own.
	var done sync.WaitGroup
	var lost atomic.Int64
	for i := range 2 {
		to := b.lane(3, uint32(i))
		done.Go(func() {
			for n := range 150 {
				one(to, func(c *rdma.Chain) {
					for at := i; at < 32; at += 2 {
						c.Write(uint64(16384+at), []byte{byte(n)})
					}
				})
				var back [32]byte
				one(to, func(c *rdma.Chain) { c.Read(16384, back[:]) })
				for at := i; at < 32; at += 2 {
					if back[at] != byte(n) {
						lost.Add(1)
					}
				}
			}
		})
	}
	done.Wait()
	require.Zero(t, lost.Load(), "bytes overwritten by a neighbour")
}
