package member

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// Timing. Every member is asked about once in probeEvery by some other; one that
// does not answer is silent to all after about three times that.
const (
	probeEvery   = 50 * time.Millisecond
	probeTimeout = 25 * time.Millisecond // of the direct way; then by others, and over TCP
	gossipEvery  = 20 * time.Millisecond
	// syncEvery exchanges whole lists, between two members. One whose way to the others
	// was lost for a while, and who has heard them all the time, learns only so that it
	// is taken for silent: what it said against that was lost.
	syncEvery   = 5 * time.Second
	streamTime  = time.Second // of a connection for such
	leaveTime   = 100 * time.Millisecond
	tellEvery   = time.Second     // looks whether there is something new to tell of oneself
	seedEvery   = 2 * time.Second // looks whether those who should be there are
	resolveTime = time.Second
	maxSeeds    = 4         // that are called at a time
	keepSilent  = time.Hour // members that are no more are forgotten
	maxMembers  = 10_000    // beyond them nobody is taken in
)

// Config of a List. All but Seeds, Changed, Token and Logger are needed.
type Config struct {
	Cluster []byte // uuid
	Secret  []byte // the ticket key
	Token   string
	// Self is asked what to tell of this member: at the start, and every second.
	Self func() About
	// Seeds are addresses of members that should be in the list; it calls those that
	// are not. Addresses may be of names.
	Seeds func() []string
	// Changed is told of every member that joins, falls silent, leaves or says
	// something new. It must not wait.
	Changed func(Member)
	Logger  *slog.Logger
}

// Port is where gossip is heard, before it is known of which cluster.
type Port struct {
	transport Transport
	host      string // as others are told
	ip        netip.Addr
	port      int
}

// Transport is how packets and connections come and go.
type Transport = memberlist.NodeAwareTransport

// Listen opens a port, host:port, of both UDP and TCP; port 0 takes a free one.
// advertise is the name or address that others reach it by; "" is that of listen.
func Listen(ctx context.Context, listen, advertise string) (*Port, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("gossip on %q: want host:port: %w", listen, err)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("gossip on %q: port %q: want a number", listen, port)
	}
	at, err := resolve(ctx, cmp.Or(host, "0.0.0.0"))
	if err != nil {
		return nil, fmt.Errorf("gossip on %q: %w", listen, err)
	}
	p := &Port{host: cmp.Or(advertise, host), ip: at}
	if advertise != "" {
		ip, err := resolve(ctx, advertise)
		switch {
		case err == nil:
			p.ip = ip
		case !at.IsUnspecified():
			return nil, fmt.Errorf("gossip at %q: %w", advertise, err)
		}
	}
	// The name of a container may be known only after it has said that it is ready.
	if p.ip.IsUnspecified() {
		if p.ip, err = own(); err != nil {
			return nil, fmt.Errorf("gossip on %q: %w", listen, err)
		}
		if advertise == "" {
			p.host = p.ip.String()
		}
	}
	nt, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{at.String()}, BindPort: int(number), Logger: new(lines).logger()})
	if err != nil {
		return nil, fmt.Errorf("gossip on %s: %w", listen, err)
	}
	p.transport, p.port = nt, nt.GetAutoBindPort()
	return p, nil
}

// Address is where others reach the port.
func (p *Port) Address() string { return net.JoinHostPort(p.host, strconv.Itoa(p.port)) }

// Close closes a port that no List has taken over.
func (p *Port) Close() error {
	// It waits for those who hand over what has come in.
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case <-p.transport.PacketCh():
			case c := <-p.transport.StreamCh():
				c.Close()
			case <-done:
				return
			}
		}
	}()
	return p.transport.Shutdown()
}

// resolve is the address of a name; IPv4 before IPv6.
func resolve(ctx context.Context, host string) (netip.Addr, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, ip := range ips {
		if ip = ip.Unmap(); ip.Is4() {
			return ip, nil
		}
	}
	return ips[0], nil
}

// own is an address of this host that others may reach; IPv4 before IPv6.
func own() (best netip.Addr, err error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return best, err
	}
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().IsGlobalUnicast() && (!best.IsValid() || ip.Unmap().Is4() && !best.Is4()) {
			best = ip.Unmap()
		}
	}
	if !best.IsValid() {
		return best, errors.New("this host has no address that others reach: name one")
	}
	return best, nil
}

// List is one member's view of all.
type List struct {
	cfg    Config
	ml     *memberlist.Memberlist
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	lines  lines

	mu   sync.Mutex
	self []byte
	seen map[string]*Member // by name
}

// Join takes part in a cluster's gossip. The port is the list's from here on.
func (p *Port) Join(cfg Config) (*List, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if len(cfg.Cluster) == 0 || len(cfg.Secret) == 0 {
		return nil, errors.New("gossip: no cluster and key given")
	}
	key, err := hkdf.Key(sha256.New, append(bytes.Clone(cfg.Secret), cfg.Token...), cfg.Cluster, "quarry gossip 1", 32)
	if err != nil {
		return nil, fmt.Errorf("gossip: %w", err)
	}
	about := cfg.Self()
	l := &List{cfg: cfg, self: about.encode(), seen: map[string]*Member{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	m := memberlist.DefaultLANConfig()
	m.Name = about.name()
	m.Label = "quarry " + hex.EncodeToString(cfg.Cluster)
	m.SecretKey = key
	m.Transport = p.transport
	m.BindPort, m.AdvertiseAddr, m.AdvertisePort = p.port, p.ip.String(), p.port
	m.ProbeInterval, m.ProbeTimeout = probeEvery, probeTimeout
	m.GossipInterval, m.PushPullInterval = gossipEvery, syncEvery
	m.SuspicionMult, m.SuspicionMaxTimeoutMult = 1, 1 // a doubt of anybody's is a doubt
	m.TCPTimeout = streamTime
	m.EnableCompression = false // a few hundred bytes
	m.Delegate, m.Events, m.Alive = delegate{l}, events{l}, alive{l}
	l.lines.log = cfg.Logger
	m.Logger = l.lines.logger()
	if l.ml, err = memberlist.Create(m); err != nil {
		l.cancel()
		return nil, fmt.Errorf("gossip at %s: %w", p.Address(), err)
	}
	l.wg.Go(l.tell)
	l.wg.Go(l.call)
	return l, nil
}

// Close says goodbye and ends.
func (l *List) Close() error {
	l.cancel()
	l.wg.Wait()
	defer l.lines.stop()
	_ = l.ml.Leave(leaveTime) // who does not hear the goodbye finds out
	return l.ml.Shutdown()
}

// Members are those of whom the list knows, this one too, by kind and name.
func (l *List) Members() []Member {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Member
	for _, m := range l.seen {
		out = append(out, *m)
	}
	slices.SortFunc(out, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name), a.Since.Compare(b.Since), cmp.Compare(a.Life, b.Life))
	})
	return out
}

// tell tells the others when there is something new.
func (l *List) tell() {
	for l.wait(tellEvery) {
		about := l.cfg.Self().encode()
		l.mu.Lock()
		same := bytes.Equal(about, l.self)
		l.self = about
		l.forget()
		l.mu.Unlock()
		if !same {
			_ = l.ml.UpdateNode(tellEvery) // else it goes with the next list
		}
	}
}

// forget drops members that have been gone for long. Call with mu held.
func (l *List) forget() {
	for name, m := range l.seen {
		if m.State != Alive && time.Since(m.Since) > keepSilent {
			delete(l.seen, name)
		}
	}
}

// call calls seeds that are not in the list.
func (l *List) call() {
	for first := true; first || l.wait(seedEvery); first = false {
		if l.cfg.Seeds == nil {
			return
		}
		l.callOnce()
	}
}

func (l *List) callOnce() {
	var missing []string
	for _, s := range l.cfg.Seeds() {
		host, port, err := net.SplitHostPort(s)
		if err != nil || len(missing) == maxSeeds {
			continue
		}
		ip, err := resolve(l.ctx, host)
		if err != nil {
			continue // its name comes with it
		}
		if at := net.JoinHostPort(ip.String(), port); !l.has(at) && !slices.Contains(missing, at) {
			missing = append(missing, at)
		}
	}
	if len(missing) > 0 {
		// Those that do not answer may be gone: the list goes on without them.
		_, _ = l.ml.Join(missing)
	}
}

func (l *List) has(address string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.seen {
		if m.State == Alive && m.Address == address {
			return true
		}
	}
	return false
}

func (l *List) wait(d time.Duration) bool {
	select {
	case <-l.ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// heard notes what memberlist has seen. It holds its lock: what it gives is copied.
func (l *List) heard(n *memberlist.Node, state State) {
	about, err := decode(n.Name, n.Meta)
	if err != nil {
		return // alive has refused it
	}
	m := &Member{About: about, Address: n.Address(), State: state, Since: time.Now()}
	l.mu.Lock()
	if old := l.seen[n.Name]; old != nil && old.State == state {
		m.Since = old.Since
	}
	l.seen[n.Name] = m
	l.mu.Unlock()
	if l.cfg.Changed != nil && l.ctx.Err() == nil {
		l.cfg.Changed(*m)
	}
}

// events implements memberlist.EventDelegate.
type events struct{ l *List }

func (e events) NotifyJoin(n *memberlist.Node)   { e.l.heard(n, Alive) }
func (e events) NotifyUpdate(n *memberlist.Node) { e.l.heard(n, Alive) }
func (e events) NotifyLeave(n *memberlist.Node)  { e.l.heard(n, Silent) }

// alive implements memberlist.AliveDelegate.
type alive struct{ l *List }

func (a alive) NotifyAlive(n *memberlist.Node) error {
	about, err := decode(n.Name, n.Meta)
	if err != nil {
		return err
	}
	if about.name() != n.Name {
		return fmt.Errorf("member %q calls itself %q", cut(n.Name), about.name())
	}
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if a.l.seen[n.Name] == nil && len(a.l.seen) >= maxMembers {
		return fmt.Errorf("member %q: the list has %d, the most there can be", n.Name, maxMembers)
	}
	return nil
}

// delegate implements memberlist.Delegate: a member tells of itself, and no more.
type delegate struct{ l *List }

func (d delegate) NodeMeta(limit int) []byte {
	d.l.mu.Lock()
	defer d.l.mu.Unlock()
	return d.l.self[:min(len(d.l.self), limit)]
}

func (delegate) NotifyMsg([]byte)                {}
func (delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (delegate) LocalState(bool) []byte          { return nil }
func (delegate) MergeRemoteState([]byte, bool)   {}
