package pulse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

const (
	tickEvery   = clock.Grain / calmTicks
	seedEvery   = 24 * clock.Grain // looks where members should be
	resolveTime = time.Second
	maxSeeds    = 64
	maxReads    = 4096 // datagrams in a tick
)

// Config of a List. All but Seeds, Changed, Led and Logger are needed.
type Config struct {
	Cluster []byte // uuid
	// Secret is the cluster's at a controller, and NodeSecret of the incarnation at a storage node.
	Secret      []byte
	Kind        Kind
	Incarnation uint64 // not 0; never the same for another process
	Node        uint32 // number of a storage node
	// Self is asked in each tick. It must not wait.
	Self func() Self
	// Seeds are addresses of controllers; the list calls those from which it receives nothing.
	// Addresses may be of names.
	Seeds func() []string
	// Changed is called at each change of a member's state, Led when another controller
	// leads: 0 if none that answers does. They must not wait.
	Changed func(Member)
	Led     func(incarnation uint64)
	Logger  *slog.Logger
}

// List is one process's view of the members.
type List struct {
	cfg    Config
	port   *Port
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	leader atomic.Uint64

	mu      sync.Mutex // of machine and since
	machine *machine
	since   map[uint64]time.Time // of states, by incarnation
}

// Join takes part in a cluster's pulse. The port is the list's from here on.
func (p *Port) Join(cfg Config) (*List, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if len(cfg.Cluster) == 0 || len(cfg.Secret) == 0 || cfg.Incarnation == 0 {
		return nil, errors.New("pulse: no cluster, key and incarnation given")
	}
	m, err := newMachine(cfg.Kind, cfg.Incarnation, cfg.Node, keys{bytes.Clone(cfg.Secret), cfg.Cluster})
	if err != nil {
		return nil, fmt.Errorf("pulse: %w", err)
	}
	l := &List{cfg: cfg, port: p, machine: m, since: map[uint64]time.Time{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(l.run)
	l.wg.Go(l.seek)
	return l, nil
}

// Close tells the others that this member leaves, and ends.
func (l *List) Close() error {
	l.cancel()
	l.wg.Wait()
	return l.port.Close()
}

// run executes the ticks.
func (l *List) run() {
	// A timer of the Go runtime: a thread that waits for one of the kernel costs more, because the
	// runtime's monitor looks after threads in system calls.
	ticks, wait := restFor(1)
	look := time.NewTimer(wait)
	defer look.Stop()
	last := time.Now()
	var news []news
	for l.ctx.Err() == nil {
		select {
		case <-l.ctx.Done():
		case now := <-look.C:
			news = l.step(ticks, now.Sub(last) > pausedAt*tickEvery, news[:0])
			last = now
			ticks, wait = restFor(l.rest())
			look.Reset(wait)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.machine.tick(1, false) // no sequence number is used twice
	l.machine.send(l.cfg.Self(), true, l.port.send)
}

// restFor is the wait until a look that is due after some ticks, and how many of them pass in it:
// fewer if the last look was late or between two that are calm.
func restFor(due uint64) (ticks uint64, wait time.Duration) {
	wait = clock.Aligned(time.Duration(due) * tickEvery)
	return uint64(max(1, wait.Round(tickEvery)/tickEvery)), wait
}

// rest is after how many ticks the next look is due.
func (l *List) rest() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.machine.rest()
}

// step is the look of one tick, ticks after the one before.
func (l *List) step(ticks uint64, paused bool, news []news) []news {
	self := l.cfg.Self()
	l.mu.Lock()
	m := l.machine
	m.tick(ticks, paused)
	for range maxReads {
		from, b, ok := l.port.receive()
		if !ok {
			break
		}
		m.receive(from, b)
	}
	news = m.judge(news)
	var told []Member
	for _, n := range news {
		l.since[n.peer.incarnation] = time.Now()
		told = append(told, l.member(n.peer))
	}
	if len(l.since) > len(m.peers) {
		for incarnation := range l.since {
			if m.peers[incarnation] == nil {
				delete(l.since, incarnation)
			}
		}
	}
	m.send(self, false, l.port.send)
	leader := m.leader()
	l.mu.Unlock()
	if l.leader.Swap(leader) != leader && l.cfg.Led != nil {
		l.cfg.Led(leader)
	}
	for _, t := range told {
		if l.cfg.Changed != nil {
			l.cfg.Changed(t)
		}
	}
	return news
}

// Leader is the incarnation of the controller that leads and answers; 0 if there is none.
func (l *List) Leader() uint64 { return l.leader.Load() }

// Answers says whether an incarnation has answered lately: it is neither suspect nor silent.
func (l *List) Answers(incarnation uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.machine.peers[incarnation]
	return p != nil && p.state == Alive
}

// Silent says whether an incarnation is silent.
func (l *List) Silent(incarnation uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.machine.peers[incarnation]
	return p != nil && p.state == Silent
}

// Members are the others that have answered, by kind and incarnation.
func (l *List) Members() (out []Member) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.machine.order {
		if p.state != "" {
			out = append(out, l.member(p))
		}
	}
	slices.SortStableFunc(out, func(a, b Member) int { return int(a.Kind) - int(b.Kind) })
	return out
}

// member is a copy. Call with mu held.
func (l *List) member(p *peer) Member {
	return Member{Kind: p.kind, Incarnation: p.incarnation, Node: p.node, Address: p.addr, Health: p.health, Term: p.term, State: p.state,
		Since: l.since[p.incarnation], Silent: slices.Clone(p.silent)}
}

// Counts are of datagrams.
type Counts struct {
	Received                     uint64
	Malformed, Foreign, Replayed uint64 // of them, dropped
}

// Counts of this list.
func (l *List) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.machine
	return Counts{m.received, m.dropped[0], m.dropped[1], m.dropped[2]}
}

// seek looks where members should be.
func (l *List) seek() {
	if l.cfg.Seeds == nil {
		return
	}
	known := map[string]netip.AddrPort{}
	for {
		seeds := l.cfg.Seeds()
		found, addrs := map[string]netip.AddrPort{}, []netip.AddrPort(nil)
		for _, s := range seeds[:min(len(seeds), maxSeeds)] {
			a, err := resolvePort(l.ctx, s)
			if err != nil {
				a = known[s] // what its name was before
			}
			if a.IsValid() {
				found[s] = a
				addrs = append(addrs, a)
			}
		}
		known = found
		l.mu.Lock()
		l.machine.seedAt(addrs)
		l.mu.Unlock()
		select {
		case <-l.ctx.Done():
			return
		case <-time.After(clock.Aligned(seedEvery)):
		}
	}
}

// resolvePort is the address of a host:port.
func resolvePort(ctx context.Context, at string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(at); err == nil {
		return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()), nil
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return netip.AddrPort{}, err
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	ip, err := resolve(ctx, host)
	return netip.AddrPortFrom(ip, uint16(number)), err
}
