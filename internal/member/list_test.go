package member

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"
)

const patience = 20 * time.Second

// joined is a member that a test runs.
type joined struct {
	*List
	port *Port
	deaf atomic.Bool // takes no packets and no connections
	loss loss
	mu   sync.Mutex
	said About
	news []Member
}

type change func(*Config, *About)

// join starts a member that knows of the others; n is its number and life.
func join(t *testing.T, n uint32, others []*joined, changes ...change) *joined {
	t.Helper()
	p, err := Listen(t.Context(), "127.0.0.1:0", "")
	require.NoError(t, err)
	j := &joined{port: p, said: About{Kind: Storage, Name: fmt.Sprintf("n%d", n), Life: uint64(n), Node: n, Domain: "/dc/r/h", FreeBytes: 100}}
	cfg := Config{
		Cluster: []byte("cluster-00000001"), Secret: []byte("a secret of thirty-two bytes....."), Logger: slog.New(slog.DiscardHandler),
		Self: func() About { j.mu.Lock(); defer j.mu.Unlock(); return j.said },
		Seeds: func() (out []string) {
			for _, o := range others {
				out = append(out, o.port.Address())
			}
			return out
		},
		Changed: func(m Member) { j.mu.Lock(); defer j.mu.Unlock(); j.news = append(j.news, m) },
	}
	for _, c := range changes {
		c(&cfg, &j.said)
	}
	p.transport = &muffled{Transport: p.transport, deaf: &j.deaf, loss: &j.loss, packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), end: make(chan struct{}), over: make(chan struct{})}
	j.List, err = p.Join(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if j.ctx.Err() == nil {
			require.NoError(t, j.List.Close())
		}
	})
	return j
}

// loss loses what a member sends to some addresses.
type loss struct {
	mu   sync.Mutex
	to   func(address string) bool // nil: nothing is lost
	lost int
}

// begin loses what is sent to addresses from now on; nil ends it.
func (l *loss) begin(to func(address string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.to, l.lost = to, 0
}

func (l *loss) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

func (l *loss) takes(address string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.to == nil || !l.to(address) {
		return false
	}
	l.lost++
	return true
}

// muffled is a transport that loses what comes in while its member is deaf, and what
// goes out to whom its loss says.
type muffled struct {
	Transport
	deaf    *atomic.Bool
	loss    *loss
	packets chan *memberlist.Packet
	streams chan net.Conn
	begin   sync.Once
	end     chan struct{} // nobody takes anything any more
	over    chan struct{}
}

func (m *muffled) run() {
	m.begin.Do(func() {
		go func() {
			for {
				select {
				case p := <-m.Transport.PacketCh():
					if !m.deaf.Load() {
						select {
						case m.packets <- p:
						case <-m.end:
						}
					}
				case c := <-m.Transport.StreamCh():
					if m.deaf.Load() || m.loss.takes(c.RemoteAddr().String()) { // nor would it get its answer
						c.Close()
						continue
					}
					select {
					case m.streams <- c:
					case <-m.end:
						c.Close()
					}
				case <-m.over:
					return
				}
			}
		}()
	})
}

func (m *muffled) WriteTo(b []byte, addr string) (time.Time, error) {
	return m.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (m *muffled) WriteToAddress(b []byte, addr memberlist.Address) (time.Time, error) {
	if m.loss.takes(addr.Addr) {
		return time.Now(), nil
	}
	return m.Transport.WriteToAddress(b, addr)
}

func (m *muffled) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return m.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (m *muffled) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if m.deaf.Load() || m.loss.takes(addr.Addr) { // a connection needs both ways
		return nil, errors.New("lost")
	}
	return m.Transport.DialAddressTimeout(addr, timeout)
}

func (m *muffled) PacketCh() <-chan *memberlist.Packet { m.run(); return m.packets }
func (m *muffled) StreamCh() <-chan net.Conn           { m.run(); return m.streams }
func (m *muffled) Shutdown() error {
	close(m.end)
	defer close(m.over)
	return m.Transport.Shutdown()
}

// state of a life as a member sees it; "" if it does not know it.
func (j *joined) state(life uint64) State {
	for _, m := range j.Members() {
		if m.Life == life {
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
	a := join(t, 1, nil)
	b := join(t, 2, []*joined{a})
	c := join(t, 3, []*joined{b})
	for _, j := range []*joined{a, b, c} {
		eventually(t, "all see all", func() bool { return j.state(1) == Alive && j.state(2) == Alive && j.state(3) == Alive })
	}
	got := a.Members()[2]
	require.Equal(t, About{Kind: Storage, Name: "n3", Life: 3, Node: 3, Domain: "/dc/r/h", FreeBytes: 100}, got.About)
	require.Equal(t, c.port.Address(), got.Address)

	c.mu.Lock()
	c.said.FreeBytes, c.said.Health = 7, "cut"
	c.mu.Unlock()
	eventually(t, "what a member says anew is heard", func() bool { m := a.Members()[2]; return m.FreeBytes == 7 && m.Health == "cut" })
	a.mu.Lock()
	require.NotEmpty(t, a.news, "and told")
	a.mu.Unlock()

	// One that is killed says nothing.
	c.cancel()
	c.wg.Wait()
	require.NoError(t, c.ml.Shutdown())
	eventually(t, "it is silent", func() bool { return a.state(3) == Silent && b.state(3) == Silent })
	require.Equal(t, Alive, a.state(2))
	eventually(t, "and that is told", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.news[len(a.news)-1].Life == 3 && a.news[len(a.news)-1].State == Silent
	})

	// Another life of the same name is another member.
	d := join(t, 3, []*joined{a}, func(_ *Config, s *About) { s.Life = 33 })
	eventually(t, "the new life is alive", func() bool { return a.state(33) == Alive && b.state(33) == Alive })
	require.Equal(t, Silent, b.state(3))

	// One that ends in good order says so.
	require.NoError(t, d.List.Close())
	eventually(t, "it has said goodbye", func() bool { return a.state(33) == Silent })
}

// A member that others could not reach for a while comes back by itself.
func TestFalseAlarm(t *testing.T) {
	a := join(t, 1, nil)
	b := join(t, 2, []*joined{a})
	c := join(t, 3, []*joined{a})
	eventually(t, "they see each other", func() bool { return a.state(2) == Alive && b.state(3) == Alive && c.state(2) == Alive })
	// What b is asked and told is lost: it is deaf, and others hear no answer.
	b.deaf.Store(true)
	eventually(t, "b is silent", func() bool { return a.state(2) == Silent && c.state(2) == Silent })
	b.deaf.Store(false)
	eventually(t, "and is heard again", func() bool { return a.state(2) == Alive && c.state(2) == Alive })
}

// What one member sends is lost, and what is sent to it is not; then the other way
// round. All others find it silent, and go on seeing each other, whatever it says of them.
func TestOneWayLoss(t *testing.T) {
	a := join(t, 1, nil)
	b := join(t, 2, []*joined{a})
	c := join(t, 3, []*joined{a})
	all := func() bool {
		for _, j := range []*joined{a, b, c} {
			for life := range uint64(3) {
				if j.state(life+1) != Alive {
					return false
				}
			}
		}
		return true
	}
	eventually(t, "they see each other", all)

	b.loss.begin(func(string) bool { return true })
	eventually(t, "b is mute, and silent to the others", func() bool { return a.state(2) == Silent && c.state(2) == Silent })
	eventually(t, "which see each other", func() bool { return a.state(3) == Alive && c.state(1) == Alive })
	b.loss.begin(nil)
	eventually(t, "it is heard again", all)

	b.deaf.Store(true)
	eventually(t, "b is deaf, and silent to the others", func() bool { return a.state(2) == Silent && c.state(2) == Silent })
	eventually(t, "it takes them for gone, and says so", func() bool { return b.state(1) == Silent && b.state(3) == Silent })
	eventually(t, "they know better", func() bool { return a.state(3) == Alive && c.state(1) == Alive })
	b.deaf.Store(false)
	eventually(t, "it hears again", all)

	// Only the way from a to b is lost: c passes on what they ask about each other.
	to := b.port.Address()
	a.loss.begin(func(address string) bool { return address == to })
	eventually(t, "much is lost", func() bool { return a.loss.count() > 20 })
	eventually(t, "and nobody is taken for gone", all)
}

func TestStrangersAreRefused(t *testing.T) {
	a := join(t, 1, nil)
	b := join(t, 2, []*joined{a})
	eventually(t, "they see each other", func() bool { return a.state(2) == Alive })
	for i, other := range []change{
		func(c *Config, _ *About) { c.Secret = []byte("another secret of as many bytes..") },
		func(c *Config, _ *About) { c.Token = "a token that the others have not" },
		func(c *Config, _ *About) { c.Cluster = []byte("cluster-00000002") },
	} {
		x := join(t, uint32(10+i), []*joined{a, b}, other)
		require.Error(t, func() error { _, err := x.ml.Join([]string{a.port.Address()}); return err }())
		require.Empty(t, x.state(1))
		require.Empty(t, a.state(uint64(10+i)))
		require.Len(t, x.Members(), 1)
	}
	// Nor does noise do harm.
	conn, err := net.Dial("udp", a.port.Address())
	require.NoError(t, err)
	defer conn.Close()
	for n := range 200 {
		_, err = conn.Write([]byte(strings.Repeat(string(rune('a'+n%26)), 1+n*7)))
		require.NoError(t, err)
	}
	require.Equal(t, Alive, a.state(2))
	_, err = opened(t).Join(Config{Self: func() About { return About{} }})
	require.ErrorContains(t, err, "no cluster and key")
}

func opened(t *testing.T) *Port {
	p, err := Listen(t.Context(), "127.0.0.1:0", "")
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestAboutHasLimits(t *testing.T) {
	long := About{Kind: Controller, Name: strings.Repeat("é", 500), Life: 1 << 63, Node: 1 << 31, Domain: strings.Repeat("\"", 500),
		Health: strings.Repeat("\x01", 500), CapacityBytes: 1 << 62, FreeBytes: 1 << 62}
	for range 100 {
		long.Silent = append(long.Silent, 1<<63)
	}
	b := long.encode()
	require.LessOrEqual(t, len(b), maxAbout)
	got, err := decode("x", b)
	require.NoError(t, err)
	require.Equal(t, long.Life, got.Life)
	require.Equal(t, long.FreeBytes, got.FreeBytes)
	same := About{Kind: Storage, Name: "n1", Life: 5, Node: 1, Domain: "/a/b/c", Health: "well", CapacityBytes: 2, FreeBytes: 1, Silent: []uint64{9}}
	got, err = decode("x", same.encode())
	require.NoError(t, err)
	require.Equal(t, same, got)
	for _, bad := range []string{``, `{`, `[]`, `{"k":"client","n":"x","l":1}`, `{"k":"storage","n":"x"}`, `{"k":"storage","l":-1}`,
		`{"k":"storage","l":1,"n":"` + strings.Repeat("x", 65) + `"}`, `{"k":"storage","l":1,"s":[1,2,3,4,5,6,7,8,9]}`, strings.Repeat(" ", 513)} {
		_, err := decode("x", []byte(bad))
		require.Error(t, err, "%q", bad)
	}
}

func FuzzAbout(f *testing.F) {
	f.Add(About{Kind: Storage, Name: "n1", Life: 5}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := decode("x", b); err == nil {
			again, err := decode("x", a.encode())
			require.NoError(t, err)
			require.Equal(t, a.Life, again.Life)
		}
	})
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
	conn, err := net.Dial("udp", everywhere.Address())
	require.NoError(t, err)
	defer conn.Close()
	for range 10 {
		_, err = conn.Write([]byte("nobody reads that"))
		require.NoError(t, err)
	}
	require.NoError(t, everywhere.Close(), "also with packets that wait")
}
