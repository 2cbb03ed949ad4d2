package pulse

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// joined is a member that a test runs, with a socket.
type joined struct {
	*List
	port *Port
	deaf atomic.Bool // takes nothing
	mute atomic.Bool // sends nothing
	term atomic.Uint64
	led  atomic.Uint64
	mu   sync.Mutex
	news []Member
}

// join starts a member that calls the others.
func join(t *testing.T, kind Kind, incarnation uint64, others []*joined, changes ...func(*Config)) *joined {
	t.Helper()
	p, err := Listen(t.Context(), "127.0.0.1:0", "")
	require.NoError(t, err)
	j := &joined{port: p}
	cfg := Config{
		Cluster: []byte("cluster-00000001"), Secret: []byte("a secret of thirty-two bytes....."), Logger: slog.New(slog.DiscardHandler),
		Kind: kind, Incarnation: incarnation, Node: uint32(incarnation), Self: func() Self { return Self{Term: j.term.Load()} },
		Seeds: func() (out []string) {
			for _, o := range others {
				out = append(out, o.port.Address())
			}
			return out
		},
		Changed: func(m Member) { j.mu.Lock(); defer j.mu.Unlock(); j.news = append(j.news, m) },
		Led:     func(incarnation uint64) { j.led.Store(incarnation) },
	}
	for _, c := range changes {
		c(&cfg)
	}
	if kind == Storage {
		cfg.Secret = NodeSecret(cfg.Secret, cfg.Cluster, incarnation)
	}
	send, receive := p.send, p.receive
	p.send = func(to netip.AddrPort, b []byte) {
		if !j.mute.Load() {
			send(to, b)
		}
	}
	p.receive = func() (netip.AddrPort, []byte, bool) {
		for {
			from, b, ok := receive()
			if !ok || !j.deaf.Load() {
				return from, b, ok
			}
		}
	}
	j.List, err = p.Join(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, j.List.Close()) })
	return j
}

// kill ends a member that says nothing.
func (j *joined) kill(t *testing.T) {
	j.mute.Store(true)
	require.NoError(t, j.List.Close())
}

// state of an incarnation as a member sees it; "" if it does not know it.
func (j *joined) state(incarnation uint64) State {
	for _, m := range j.Members() {
		if m.Incarnation == incarnation {
			return m.State
		}
	}
	return ""
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, patience, 5*time.Millisecond, what)
}

func TestMembersHearOfEachOther(t *testing.T) {
	a := join(t, Controller, 1, nil)
	b := join(t, Controller, 2, []*joined{a})
	n := join(t, Storage, 3, []*joined{a, b})
	eventually(t, "all see all", func() bool {
		return a.state(2) == Alive && a.state(3) == Alive && b.state(1) == Alive && b.state(3) == Alive && n.state(1) == Alive && n.state(2) == Alive
	})
	m := a.Members()[0]
	require.Equal(t, Storage, m.Kind)
	require.Equal(t, n.port.Address(), m.Address.String())
	require.Equal(t, uint32(3), m.Node)
	require.True(t, a.Answers(3))
	require.False(t, a.Silent(3))
	require.NotZero(t, a.Counts().Received)

	a.term.Store(7)
	eventually(t, "the leader is known", func() bool { return n.Leader() == 1 && n.led.Load() == 1 && b.Leader() == 1 })

	// One that is killed says nothing.
	n.kill(t)
	eventually(t, "it is silent", func() bool { return a.Silent(3) && b.Silent(3) })
	require.Equal(t, Alive, a.state(2))
	a.mu.Lock()
	require.NotEmpty(t, a.news)
	require.Equal(t, Silent, a.news[len(a.news)-1].State)
	require.Less(t, time.Since(a.news[len(a.news)-1].Since), patience)
	a.mu.Unlock()

	// Another incarnation is another member.
	again := join(t, Storage, 33, []*joined{a, b})
	eventually(t, "the new incarnation is alive", func() bool { return a.state(33) == Alive && b.state(33) == Alive })
	require.Equal(t, Silent, b.state(3))
	require.NoError(t, again.List.Close())
	eventually(t, "it has said goodbye", func() bool { return a.state(33) == Silent })
}

// A member that others could not reach for a while, in either direction, comes back by itself.
func TestFalseAlarm(t *testing.T) {
	a := join(t, Controller, 1, nil)
	b := join(t, Controller, 2, []*joined{a})
	n := join(t, Storage, 3, []*joined{a, b})
	all := func() bool { return a.state(3) == Alive && b.state(3) == Alive && n.state(1) == Alive }
	for _, lost := range []*atomic.Bool{&n.deaf, &n.mute} {
		eventually(t, "they see each other", all)
		lost.Store(true)
		eventually(t, "n is silent", func() bool { return a.state(3) == Silent && b.state(3) == Silent })
		require.True(t, a.state(2) != Silent)
		lost.Store(false)
	}
	eventually(t, "and is heard again", all)
}

func TestUnknownKeysAreRefused(t *testing.T) {
	a := join(t, Controller, 1, nil)
	b := join(t, Controller, 2, []*joined{a})
	eventually(t, "they see each other", func() bool { return a.state(2) == Alive })
	for i, other := range []func(*Config){
		func(c *Config) { c.Secret = []byte("another secret of as many bytes..") },
		func(c *Config) { c.Secret = NodeSecret(c.Secret, c.Cluster, c.Incarnation) }, // a storage node's
		func(c *Config) { c.Cluster = []byte("cluster-00000002") },
	} {
		before := a.Counts().Foreign
		x := join(t, Controller, uint64(10+i), []*joined{a, b}, other)
		eventually(t, "its calls are counted", func() bool { return a.Counts().Foreign > before+1 })
		require.Empty(t, x.Members())
		require.Empty(t, a.state(uint64(10+i)))
	}
	// Nor does noise do harm.
	conn, err := net.Dial("udp", a.port.Address())
	require.NoError(t, err)
	defer conn.Close()
	eventually(t, "noise is counted", func() bool {
		for n := range 50 {
			_, err = conn.Write([]byte(strings.Repeat(string(rune('a'+n%26)), 1+n*37)))
			require.NoError(t, err)
		}
		return a.Counts().Malformed > 100
	})
	eventually(t, "and the others are there", func() bool { return a.state(2) == Alive })
	_, err = opened(t).Join(Config{})
	require.ErrorContains(t, err, "no cluster, key and incarnation")
}

func opened(t *testing.T) *Port {
	p, err := Listen(t.Context(), "127.0.0.1:0", "")
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestListenRefuses(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, bad := range []string{"", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", "no.such.host.invalid:1"} {
		_, err := Listen(ctx, bad, "")
		require.Error(t, err, bad)
	}
	first := opened(t)
	_, err := Listen(ctx, first.Address(), "")
	require.ErrorContains(t, err, "in use")
	everywhere, err := Listen(ctx, "0.0.0.0:0", "127.0.0.1")
	require.NoError(t, err)
	require.Contains(t, everywhere.Address(), "127.0.0.1:")
	require.NoError(t, everywhere.Close())
	require.NoError(t, everywhere.Close(), "twice")
}

// Both families of addresses, by name too; what is sent to itself is one's own.
func TestSocket(t *testing.T) {
	for _, listen := range []string{"127.0.0.1:0", "[::1]:0"} {
		p, err := Listen(t.Context(), listen, "")
		if err != nil && listen[0] == '[' {
			t.Skip("no IPv6: ", err)
		}
		require.NoError(t, err)
		at, err := resolvePort(t.Context(), p.Address())
		require.NoError(t, err)
		_, _, ok := p.receive()
		require.False(t, ok, "nothing is there")
		eventually(t, "a datagram comes", func() bool {
			p.send(at, []byte("hello"))
			from, b, ok := p.receive()
			return ok && from == at && string(b) == "hello"
		})
		require.NoError(t, p.Close())
		_, _, ok = p.receive()
		require.False(t, ok)
		p.send(at, []byte("nobody"))
	}
	at, err := resolvePort(t.Context(), "localhost:7425")
	require.NoError(t, err)
	require.True(t, at.Addr().IsLoopback())
	_, err = resolvePort(t.Context(), "localhost")
	require.Error(t, err)
}
