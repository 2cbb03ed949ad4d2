package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestContextsThatHaveEnded: every call of the package returns the error of a context
// that has ended, on each transport, and does nothing.
func TestContextsThatHaveEnded(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			c := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			ref, err := c.Alloc(t.Context(), []byte("as it was"), client.AllocOptions{})
			require.NoError(t, err)
			name := "kept by " + transport
			_, err = c.Names().Create(t.Context(), name, "object", ref)
			require.NoError(t, err)
			session := c.SessionID()
			op := c.Operation()
			watch, err := c.Watch(t.Context(), ref)
			require.NoError(t, err)
			defer watch.Close()
			watcher, err := c.NewWatcher()
			require.NoError(t, err)
			defer watcher.Close()
			other := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			mine, err := other.Alloc(t.Context(), []byte("held"), client.AllocOptions{})
			require.NoError(t, err)
			held, err := other.Reserve(t.Context(), mine)
			require.NoError(t, err)
			defer func() { require.NoError(t, held.Release()) }()
			testcluster.ContextCalls(t, []any{c, held, c.Names(), c.Jobs(), &op, client.KeyFile("keys"), watch, watcher}, map[string]func(context.Context) error{
				"Connect": func(ctx context.Context) error {
					_, err := client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}})
					return err
				},
			}, ref, ref.Addr, []client.Ref{ref}, []byte("changed"), [][]byte{[]byte("changed")}, name, uint64(1))
			got, err := c.Read(t.Context(), ref, nil)
			require.NoError(t, err)
			require.Equal(t, "as it was", string(got))
			_, err = c.Names().Lookup(t.Context(), name)
			require.NoError(t, err)
			require.Equal(t, session, c.SessionID())
		})
	}
}

// TestContextsEndBetweenRounds: a call of many rounds stops after the round in which
// its context ends, gives back what it has made, and the session goes on.
func TestContextsEndBetweenRounds(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{RegionBytes: 256 << 20})
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			c := cluster.Connect(client.Config{Transport: transport, Lanes: 1})
			session := c.SessionID()
			var refs []client.Ref
			for range 1000 {
				ref, err := c.Alloc(t.Context(), []byte("small"), client.AllocOptions{})
				require.NoError(t, err)
				refs = append(refs, ref)
			}
			t.Run("ReadMany", func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				seen := 0
				err := c.ReadMany(ctx, refs, func(int, []byte, error) { seen++; cancel() })
				require.ErrorIs(t, err, context.Canceled)
				require.LessOrEqual(t, seen, 128, "those of one round")
			})
			t.Run("Update", func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				err := c.Update(ctx, refs[0], func([]byte) ([]byte, error) { cancel(); return []byte("late"), nil })
				require.ErrorIs(t, err, context.Canceled)
				got, err := c.Read(t.Context(), refs[0], nil)
				require.NoError(t, err)
				require.Equal(t, "small", string(got))
				require.NoError(t, c.Write(t.Context(), refs[0], []byte("small")), "nobody holds it")
			})
			require.Equal(t, session, c.SessionID())
		})
	}
}

// TestShortDeadlinesKeepTheSession: a deadline that passes while verbs are under way
// costs the lane's connection, not the session with all its lanes. The object of each
// call that failed is gone, and what the calls have made is freed.
func TestShortDeadlinesKeepTheSession(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{RegionBytes: 256 << 20})
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		t.Run(transport, func(t *testing.T) {
			c := cluster.Connect(client.Config{Transport: transport, Lanes: 2})
			ref, err := c.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
			require.NoError(t, err)
			session, failed := c.SessionID(), 0
			big := make([]byte, 40<<20)
			for i := range 7 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(3+2*i)*time.Millisecond)
				made, err := c.Alloc(ctx, big, client.AllocOptions{})
				cancel()
				if err == nil {
					require.NoError(t, c.Free(t.Context(), made))
				} else {
					require.True(t, errors.Is(err, context.DeadlineExceeded) || errors.Is(err, client.ErrUnknown), "%v", err)
					failed++
				}
				require.NoError(t, c.Write(t.Context(), ref, []byte("goes on")))
			}
			require.NotZero(t, failed)
			require.Equal(t, session, c.SessionID(), "%d of 7 calls have met their deadline", failed)
		})
	}
}

// relay passes tcp connections on to a node. mute swallows what the node answers on the
// connections there are; later ones are passed on.
type relay struct {
	addr  string
	mu    sync.Mutex
	conns []*atomic.Bool // muted
}

func newRelay(t *testing.T, to string) *relay {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	r := &relay{addr: l.Addr().String()}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			muted := &atomic.Bool{}
			r.mu.Lock()
			r.conns = append(r.conns, muted)
			r.mu.Unlock()
			go func() { io.Copy(out, in); out.Close() }()
			go func() {
				defer in.Close()
				b := make([]byte, 64<<10)
				for {
					n, err := out.Read(b)
					if err != nil {
						return
					}
					if !muted.Load() {
						in.Write(b[:n])
					}
				}
			}()
		}
	}()
	return r
}

func (r *relay) mute() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		c.Store(true)
	}
}

// throughRelay makes a client reach the only node by tcp through a relay.
func throughRelay(t *testing.T, c *client.Client) *relay {
	next := client.Table(c)
	next.Revision++
	var r *relay
	for _, e := range next.Nodes[0].Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			r = newRelay(t, e.Address)
			e.Address = r.addr
		}
	}
	require.NotNil(t, r)
	require.NoError(t, client.Install(c, next))
	return r
}

// TestLostAnswersAreSettledBehindTheDeadline: the answers of a call are lost, and its
// deadline passes. The call learns over a new connection what has become of its verbs;
// the session goes on, and nobody waits for what the call held.
func TestLostAnswersAreSettledBehindTheDeadline(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Lanes: 1})
	other := cluster.Connect(client.Config{Transport: client.TransportTCP})
	small, err := other.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
	require.NoError(t, err)
	second, err := other.Alloc(t.Context(), []byte("0"), client.AllocOptions{})
	require.NoError(t, err)
	r := throughRelay(t, c)
	require.NoError(t, c.Write(t.Context(), small, []byte("1")))
	session := c.SessionID()
	refused := errors.New("refused")
	updates := func(mute bool, payload string, err error) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			op := c.Operation()
			return errors.Join(op.UpdateMany(ctx, []client.Ref{small, second, small}, func(i int, _ []byte) ([]byte, error) {
				if mute && i == 0 {
					r.mute()
				}
				return []byte(payload), err
			}, nil)...)
		}
	}
	calls := map[string]func(ctx context.Context) error{
		"Read":  func(ctx context.Context) error { _, err := c.Read(ctx, small, nil); return err },
		"Write": func(ctx context.Context) error { return c.Write(ctx, small, []byte("2")) },
		"WriteMany": func(ctx context.Context) error {
			return c.WriteMany(ctx, []client.Ref{small}, [][]byte{[]byte("3")})[0]
		},
		"UpdateMany":        updates(false, "5", nil),
		"commit of several": updates(true, "6", nil),
		"refusal of several": func(ctx context.Context) error {
			err := updates(true, "", refused)(ctx)
			require.ErrorIs(t, err, refused)
			return context.DeadlineExceeded
		},
		"Free":       func(ctx context.Context) error { return c.Free(ctx, small) },
		"Repair":     func(ctx context.Context) error { return c.Repair(ctx, small) },
		"RepairFree": func(ctx context.Context) error { return c.RepairFree(ctx, small.Addr) },
		"RepairBlock": func(ctx context.Context) error {
			_, err := c.RepairBlock(ctx, small.Addr.Region(), 0)
			return err
		},
		"commit": func(ctx context.Context) error {
			return c.Update(ctx, small, func([]byte) ([]byte, error) { r.mute(); return []byte("4"), nil })
		},
		"Alloc": func(ctx context.Context) error {
			ref, err := c.Alloc(ctx, []byte("new"), client.AllocOptions{})
			if err == nil {
				err = c.Free(t.Context(), ref)
			}
			return err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			before, err := c.Read(t.Context(), small, nil)
			require.NoError(t, err)
			if name != "commit" && !strings.HasSuffix(name, "of several") {
				r.mute()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			err = call(ctx)
			cancel()
			if err != nil { // a commit whose answer was lost is found done, or is carried out
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.NotErrorIs(t, err, client.ErrUnknown)
				after, err := c.Read(t.Context(), small, nil)
				require.NoError(t, err)
				if name != "commit of several" { // the other one may be done
					require.Equal(t, before, after, "not done")
				}
			}
			require.Equal(t, session, c.SessionID())
			require.NoError(t, errors.Join(other.WriteMany(t.Context(), []client.Ref{small, second}, [][]byte{[]byte("goes on"), []byte("too")})...))
			require.NoError(t, c.Write(t.Context(), small, []byte("goes on")))
		})
	}
	require.Equal(t, session, c.SessionID())
}
