package litmus

import (
	"context"
	"net"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// onTCP makes a stand in the atomicity domain of the processors.
func onTCP(t *testing.T, wrap func(rdma.Dialer) rdma.Dialer) *Stand {
	s := &Stand{Cluster: [16]byte{1}, Key: keyring.NewSigner([32]byte{2})}
	a := host.New(s.Cluster, keyring.NewRing(s.Key.Public()), 1, 1, host.Limits{})
	var err error
	s.Memory, err = host.NewMemory("litmus", regionBytes)
	require.NoError(t, err)
	s.Rotated, err = host.NewMemory("litmus", regionBytes)
	require.NoError(t, err)
	s.Rotate = rotation(s.Rotated, a)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, s.Memory))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := tcp.NewServer(a, nil)
	go server.Serve(l)
	t.Cleanup(func() {
		server.Close()
		require.NoError(t, a.Close(context.Background()))
		require.NoError(t, s.Memory.Close())
		require.NoError(t, s.Rotated.Close())
	})
	s.Dialer, s.Addr, s.Fence = wrap(tcp.Dialer{}), l.Addr().String(), a.Fence
	return s
}

func TestProgramsOnTCP(t *testing.T) {
	s := onTCP(t, func(d rdma.Dialer) rdma.Dialer { return d })
	rep := Report{Results: Run(t.Context(), s, 100*time.Millisecond, nil)}
	for each := 200 * time.Millisecond; each < 10*time.Second && slices.ContainsFunc(rep.Results, func(r Result) bool { return r.Rounds == 0 && r.Bad == 0 }); each *= 2 {
		rep.Results = Run(t.Context(), s, each, nil) // some program had no time for a round
	}
	require.NoError(t, rep.Err())
	for _, r := range rep.Results {
		t.Logf("%-12s %8d rounds, %d bad, %s", r.Name, r.Rounds, r.Bad, r.Note)
		if r.Name == "cpu-adapter" {
			require.Zero(t, r.Bad, "one domain")
		}
	}
}

// lying is a fabric that changes the chains of a program.
type lying struct {
	rdma.Dialer
	change func(c *rdma.Chain)
}

type lyingConn struct {
	rdma.Conn
	d *lying
}

func (d *lying) Dial(ctx context.Context, addr string, t *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c, err := d.Dialer.Dial(ctx, addr, t, lane)
	return lyingConn{c, d}, err
}

func (c lyingConn) Post(ch *rdma.Chain) {
	c.d.change(ch)
	c.Conn.Post(ch)
}

// denying is a fabric that answers executed chains as refused.
type denying struct{ rdma.Dialer }

type denyingConn struct{ rdma.Conn }

func (d *denying) Dial(ctx context.Context, addr string, t *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	c, err := d.Dialer.Dial(ctx, addr, t, lane)
	return denyingConn{c}, err
}

func (c denyingConn) Wait(ch *rdma.Chain, deadline int64) {
	c.Conn.Wait(ch, deadline)
	ch.Done, ch.Err = 0, rdma.ErrKey
}

// Each program marked must fails on a fabric that does the wrong thing.
func TestProgramsFindFaults(t *testing.T) {
	reverse := func(c *rdma.Chain) {
		if len(c.Verbs) == 2 {
			c.Verbs[0], c.Verbs[1] = c.Verbs[1], c.Verbs[0]
		}
	}
	var n atomic.Int64
	// seldom replaces one verb in a few by a READ and keeps its answer.
	seldom := func(op rdma.Op) func(c *rdma.Chain) {
		return func(c *rdma.Chain) {
			for i := range c.Verbs {
				if v := &c.Verbs[i]; v.Op == op {
					if n.Add(1)%7 == 0 {
						*v = rdma.Verb{Op: rdma.FetchAdd, Off: 1 << 20, Old: v.Expect}
					}
				}
			}
		}
	}
	for name, change := range map[string]func(c *rdma.Chain){
		"add-add": seldom(rdma.FetchAdd), "write-read": seldom(rdma.Write), "flush": seldom(rdma.Write), "read-write": reverse,
		"write-cas": func(c *rdma.Chain) { // the CAS first, the WRITE never
			if len(c.Verbs) == 2 && c.Verbs[1].Op == rdma.CompareSwap {
				c.Verbs[0].Off = 1 << 20
			}
		},
		"word": func(c *rdma.Chain) {
			if v := &c.Verbs[0]; v.Op == rdma.Write {
				v.Off += 4 // half a word
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n.Store(0)
			s := onTCP(t, func(d rdma.Dialer) rdma.Dialer { return &lying{Dialer: d, change: change} })
			for _, p := range programs {
				if p.name != name {
					continue
				}
				finds(t, s, p.run)
			}
		})
	}
	t.Run("refused", func(t *testing.T) {
		s := onTCP(t, func(d rdma.Dialer) rdma.Dialer { return &denying{d} })
		rotate, calls := s.Rotate, uint64(0)
		s.Rotate = func(ctx context.Context) (uint64, error) { // after the chain has been executed
			for calls > 0 && load(s.Rotated.Bytes(), 1<<20) != calls && ctx.Err() == nil {
				runtime.Gosched()
			}
			calls++
			return rotate(ctx)
		}
		_, bad, _, err := refused(t.Context(), s, time.Now())
		require.NoError(t, err)
		require.NotZero(t, bad)
	})
	t.Run("revoke", func(t *testing.T) {
		s := onTCP(t, func(d rdma.Dialer) rdma.Dialer { return d })
		s.Fence = func(context.Context, ...uint64) error { return nil } // acknowledges and does nothing
		finds(t, s, revoked)
	})
}

// finds repeats a program until it counts a forbidden outcome. A program that never does is
// ended by the deadline of the test.
func finds(t *testing.T, s *Stand, run func(context.Context, *Stand, time.Time) (uint64, uint64, string, error)) {
	t.Helper()
	for bad := uint64(0); bad == 0; {
		clear(s.Memory.Bytes()[:workBytes])
		var err error
		_, bad, _, err = run(t.Context(), s, time.Now().Add(100*time.Millisecond))
		require.NoError(t, err)
	}
}

func TestReportNamesTheFirst(t *testing.T) {
	rep := Report{Results: []Result{{Name: "a", Must: true}, {Name: "b", Bad: 3}, {Name: "c", Must: true, Bad: 2, Rounds: 9}}}
	require.ErrorIs(t, rep.Err(), ErrUnfit)
	require.ErrorContains(t, rep.Err(), "c: 2 of 9")
	rep.Results[2].Bad = 0
	require.NoError(t, rep.Err())
	rep.Results[1].Error = "broken"
	require.ErrorContains(t, rep.Err(), "b: broken")
}

// On an RDMA device: the one in the virtual machine of verify/rxevm, or the host's.
func TestProgramsOnDevice(t *testing.T) {
	if os.Getenv("RXE_DEVICE") == "" {
		_, _, _, err := OnDevice(t.Context(), verbs.Config{Device: "none"})
		require.Error(t, err)
		return
	}
	s, caps, done, err := OnDevice(t.Context(), verbs.Config{})
	require.NoError(t, err)
	rep := Report{Device: caps, Results: Run(t.Context(), s, time.Second, nil)}
	require.NoError(t, done())
	rep.Left = verbs.Live()
	require.Equal(t, verbs.Objects{}, rep.Left)
	for _, r := range rep.Results {
		t.Logf("%-12s %8d rounds, %d bad, %s %s", r.Name, r.Rounds, r.Bad, r.Note, r.Error)
	}
	require.NoError(t, rep.Err())
}
