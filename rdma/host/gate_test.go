package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

var (
	testCluster = [16]byte{1}
	testKey     = keyring.NewSigner([32]byte{2})
	testKeys    = keyring.NewRing(testKey.Public())
)

func ticket(serial uint64) *rdma.Credentials {
	return rdma.Issue(testKey, rdma.Ticket{Cluster: testCluster, Session: uint32(serial), Serial: serial, Rights: rdma.ReadWrite})
}

// admitAs shows credentials as a client does.
func admitAs(ctx context.Context, a *Access, as *rdma.Credentials, number uint32, e Entry) (*Lane, error) {
	c := a.Challenge()
	h, err := NewHello(as, number, &c, e.Binding)
	if err != nil {
		return nil, err
	}
	return a.Admit(ctx, &h, &c, e)
}

func admit(t testing.TB, a *Access, serial uint64, number uint32) *Lane {
	l, err := admitAs(t.Context(), a, ticket(serial), number, Entry{Provider: "test"})
	require.NoError(t, err)
	t.Cleanup(l.Leave)
	return l
}

func memory(t testing.TB, bytes uint64) *Memory {
	m, err := NewMemory("test", bytes)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// The argument of doc.go, tried: lanes execute as fast as they can while access is
// taken away and given back. The memory is the witness: nobody may be inside while
// the changer is sure that nobody is.
func TestGate(t *testing.T) {
	for _, change := range []string{"rotate", "close", "fence", "dial again"} {
		t.Run(change, func(t *testing.T) {
			a := New(testCluster, testKeys, 1, 1, Limits{})
			m := memory(t, 1<<20)
			require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
			const lanes = 6
			var epoch, serial atomic.Uint64
			epoch.Store(1)
			serial.Store(1)
			var stop atomic.Bool
			var ran atomic.Int64
			var done sync.WaitGroup
			for i := range lanes {
				done.Go(func() {
					buf := make([]byte, 2048)
					for j := range buf {
						buf[j] = byte(i + 1)
					}
					verbs := []rdma.Verb{{Op: rdma.Write, Off: uint64(i) * 4096, Buf: buf}, {Op: rdma.FetchAdd, Off: 65536, New: 1}}
					for !stop.Load() {
						l, err := admitAs(context.Background(), a, ticket(serial.Load()), uint32(i), Entry{})
						if err != nil {
							continue
						}
						for !stop.Load() && l.Ended() == nil {
							w, _, err := l.Open(1, epoch.Load(), 0)
							for n := 0; err == nil && !stop.Load(); n++ {
								if _, err = l.Run(0, w.Key, verbs); err == nil {
									ran.Add(1)
								}
								if n%32 == 0 {
									runtime.Gosched() // the changer wants a turn before its time slice
								}
							}
							runtime.Gosched()
						}
						l.Leave()
					}
				})
			}
			mem := m.Bytes()
			still := func() uint64 { return atomic.LoadUint64(wordAt(mem, 65536)) }
			for i, end := 0, time.Now().Add(time.Second); i < 10 || time.Now().Before(end); i++ {
				for start := ran.Load(); ran.Load() < start+3; {
					runtime.Gosched()
				}
				for range rand.IntN(5) {
					runtime.Gosched()
				}
				switch change {
				case "close", "rotate":
					e := epoch.Load()
					require.NoError(t, a.CloseRegion(t.Context(), 1, e))
					count := still()
					// Nobody may write: what the changer writes stays.
					for at := range uint64(lanes) {
						clear(mem[at*4096 : at*4096+2048])
					}
					if i%8 == 0 {
						time.Sleep(100 * time.Microsecond)
					}
					runtime.Gosched()
					require.Equal(t, count, still())
					for at := range uint64(lanes) {
						for _, b := range mem[at*4096 : at*4096+2048] {
							require.Zero(t, b, "a byte changed after the change")
						}
					}
					require.NoError(t, a.OpenRegion(t.Context(), 1, e+1, m))
					if change == "rotate" {
						require.NoError(t, a.OpenRegion(t.Context(), 1, e+2, m))
						e++
					}
					epoch.Store(e + 1)
				case "fence":
					s := serial.Load()
					require.NoError(t, a.Fence(t.Context(), s))
					count := still()
					runtime.Gosched()
					require.Equal(t, count, still())
					serial.Store(s + 1)
				case "dial again":
					l, err := admitAs(t.Context(), a, ticket(serial.Load()), uint32(i%lanes), Entry{})
					if errors.Is(err, errLate) { // the lane has dialled again since
						continue
					}
					require.NoError(t, err)
					clear(mem[i%lanes*4096:][:2048])
					runtime.Gosched()
					if l.Ended() == nil { // else the lane has taken its place back, and may write
						changed := false
						for _, b := range mem[i%lanes*4096:][:2048] {
							changed = changed || b != 0
						}
						require.True(t, !changed || l.Ended() != nil, "the former lane wrote")
					}
					l.Leave()
				}
			}
			stop.Store(true)
			done.Wait()
		})
	}
}

// Fences, rotations, dials and closes at once: all of them end.
func TestEverythingAtOnce(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{})
	m := memory(t, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var done sync.WaitGroup
	var epoch atomic.Uint64
	for i := range 4 {
		done.Go(func() {
			for n := range 200 {
				l, err := admitAs(ctx, a, ticket(uint64(n/10+1)), uint32(i%2), Entry{})
				if err != nil {
					continue
				}
				verbs := []rdma.Verb{{Op: rdma.FetchAdd, New: 1}}
				for range 20 {
					if w, _, err := l.Open(1, epoch.Load(), 0); err == nil {
						l.Run(0, w.Key, verbs)
					}
				}
				if n%3 == 0 {
					l.Leave()
				}
			}
		})
	}
	done.Go(func() {
		for e := uint64(1); e < 200; e++ {
			if err := a.OpenRegion(ctx, 1, e, m); err != nil {
				t.Error(err)
			}
			epoch.Store(e)
			if e%3 == 0 {
				if err := a.CloseRegion(ctx, 1, e); err != nil {
					t.Error(err)
				}
			}
		}
	})
	done.Go(func() {
		for s := range uint64(20) {
			for range 2 {
				if err := a.Fence(ctx, s, s+1); err != nil {
					t.Error(err)
				}
			}
			a.Sessions()
			a.Counters()
			a.Regions()
		}
	})
	done.Wait()
	l := admit(t, a, 500, 0)
	require.NoError(t, a.EndBelow(ctx, 1000, []uint64{500, 1, 2000}))
	require.NoError(t, l.Ended())
	require.Len(t, a.Sessions(), 1)
	require.Empty(t, a.ended.fenced, "Settle forgets the serials it stands for")
	require.NoError(t, a.EndBelow(ctx, 900, nil), "an older list says nothing")
	require.NoError(t, l.Ended())
	require.NoError(t, a.Fence(ctx, 500))
	_, err := admitAs(ctx, a, ticket(500), 0, Entry{})
	require.ErrorIs(t, err, rdma.ErrRevoked)
	_, err = admitAs(ctx, a, ticket(1), 0, Entry{})
	require.ErrorIs(t, err, rdma.ErrRevoked, "fenced before the list was made")
	_, err = admitAs(ctx, a, ticket(999), 0, Entry{})
	require.ErrorIs(t, err, rdma.ErrRevoked)
	require.NoError(t, a.Close(ctx))
}

// A change gives up when its context ends, and is not done then; repeated, it
// finishes the job. The lane here is one that never ends its chain.
func TestChangeNeverEndsByTime(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{})
	m := memory(t, 1<<20)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	l := admit(t, a, 1, 0)
	w, _, err := l.Open(1, 1, 0)
	require.NoError(t, err)
	busy := atomic.AddUint64(&l.page.busy, 1)
	for name, change := range map[string]func(context.Context) error{
		"close":  func(ctx context.Context) error { return a.CloseRegion(ctx, 1, 1) },
		"rotate": func(ctx context.Context) error { return a.OpenRegion(ctx, 1, 2, m) },
		"fence":  func(ctx context.Context) error { return a.Fence(ctx, 1) },
		"dial": func(ctx context.Context) error {
			_, err := admitAs(ctx, a, ticket(1), 0, Entry{})
			return err
		},
		"node": a.Close,
	} {
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
			err := change(ctx)
			cancel()
			if name == "dial" && err == rdma.ErrRevoked || err == rdma.ErrBroken {
				continue // fenced, or stopped, by one of the others already
			}
			require.ErrorIs(t, err, context.DeadlineExceeded, name)
		}
	}
	atomic.StoreUint64(&l.page.busy, busy+1)
	l.busy = busy + 1
	_, err = l.Run(0, w.Key, []rdma.Verb{{Op: rdma.FetchAdd, New: 1}})
	require.ErrorIs(t, err, rdma.ErrRefused)
	require.NoError(t, a.Close(t.Context()))
}

// hazard 34: memory whose atomics belong to an adapter is not served by CPUs.
func TestHazard34_ForeignDomain(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{})
	m := memory(t, proto.MinRegionBytes)
	h := proto.RegionHeader{Domain: proto.DomainAdapter, RegionBytes: proto.MinRegionBytes, Region: 1}
	copy(m.Bytes(), h.Encode())
	err := a.OpenRegion(t.Context(), 1, 1, m)
	require.ErrorContains(t, err, `domain "adapter"`)
	h.Domain = proto.DomainCPU
	copy(m.Bytes(), h.Encode())
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	require.NoError(t, a.Close(t.Context()))
}

// hazard 32: a thousand incarnations of a node never have the same key for a session.
func TestHazard32_ThousandIncarnations(t *testing.T) {
	m := memory(t, 1<<20)
	seen := make(map[uint64]int)
	for incarnation := range 1000 {
		a := New(testCluster, testKeys, 1, uint64(incarnation), Limits{})
		require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
		l, err := admitAs(t.Context(), a, ticket(1), 0, Entry{})
		require.NoError(t, err)
		w, _, err := l.Open(1, 1, 0)
		require.NoError(t, err)
		before, again := seen[w.Key]
		require.False(t, again, "incarnation %d has the key of incarnation %d", incarnation, before)
		seen[w.Key] = incarnation
		require.NoError(t, a.Close(t.Context()))
	}
}

// HAZARDS, security 11: limits hold, and what is refused leaves no trace.
func TestSecurity11_Limits(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{Sessions: 3, Lanes: 6, LanesPerSession: 3})
	for serial := uint64(1); serial <= 2; serial++ {
		for n := range uint32(3) {
			admit(t, a, serial, n)
		}
		_, err := admitAs(t.Context(), a, ticket(serial), 3, Entry{})
		require.ErrorIs(t, err, rdma.ErrLimit)
	}
	_, err := admitAs(t.Context(), a, ticket(3), 0, Entry{})
	require.ErrorIs(t, err, rdma.ErrFull, "lanes of the node")
	admit(t, a, 3, ProgramLane) // programs of storage nodes get in
	require.NoError(t, a.Fence(t.Context(), 3))
	require.NoError(t, a.Fence(t.Context(), 1))
	admit(t, a, 4, 0)
	admit(t, a, 7, 0)
	_, err = admitAs(t.Context(), a, ticket(5), 0, Entry{})
	require.ErrorIs(t, err, rdma.ErrFull, "sessions of the node")
	admit(t, a, 6, ProgramLane)
	require.NoError(t, a.Fence(t.Context(), 6))

	m := memory(t, 1<<20)
	l := admit(t, a, 4, 1)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	require.NoError(t, a.OpenRegion(t.Context(), 2, 1, m))
	for _, slot := range []int32{-1, MaxWindows, 1 << 30} {
		_, _, err := l.Open(1, 1, slot)
		require.ErrorIs(t, err, rdma.ErrLimit, fmt.Sprint(slot))
	}
	_, _, err = l.Open(1, 1, 7)
	require.NoError(t, err)
	_, _, err = l.Open(2, 1, 7)
	require.ErrorIs(t, err, rdma.ErrLimit, "a slot belongs to one region")
	_, _, err = l.Open(1, 1, 8)
	require.ErrorIs(t, err, rdma.ErrLimit, "a region has one slot")
	require.NoError(t, a.Close(t.Context()))
}

// TestChains: the calls of one provider's lanes below a number are counted, and no
// others, for as long as the lanes are there.
func TestChains(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{})
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, memory(t, 1<<20)))
	for i, number := range []uint32{3, 1 << 31} {
		l := admit(t, a, uint64(i+1), number)
		w, _, err := l.Open(1, 1, 0)
		require.NoError(t, err)
		for range i + 2 {
			_, err := l.Run(w.Slot, w.Key, []rdma.Verb{{Op: rdma.Read, Buf: make([]byte, 8)}})
			require.NoError(t, err)
		}
	}
	require.Equal(t, uint64(2), a.Chains("test", 1<<31))
	require.Equal(t, uint64(5), a.Chains("test", 1<<32-1))
	require.Zero(t, a.Chains("tcp", 1<<32-1))
	require.NoError(t, a.Fence(t.Context(), 1))
	require.Zero(t, a.Chains("test", 1<<31))
}
