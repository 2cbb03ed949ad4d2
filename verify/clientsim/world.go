package clientsim

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/wire"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// World is the network, the clock's faults and the processes of one schedule. All of
// it lives in one bubble of testing/synctest.
type World struct {
	opt    Options
	ctx    context.Context // of everything in the world
	cancel context.CancelFunc
	begun  time.Time // by the bubble's clock
	log    *slog.Logger
	record *recorder // keeps the log of a schedule that fails

	*dice       // of the clients' work
	fate  *dice // of faults
	seed  uint64

	wild  atomic.Pointer[wildness] // of messages now
	older atomic.Bool              // controllers are of a version that pushes no names

	mu       sync.Mutex             // guards the fields down to over
	servers  map[string]*served     // by host of the URL
	lent     map[string]*lent       // by address
	cuts     map[[2]*Proc]time.Time // until when messages from one to the other are lost
	links    map[*link]struct{}     // connections of the fabric
	etcdProc *Proc
	problems []string            // violations found so far
	lastCure time.Time           // when the last fault ended, or ends
	over     map[uint64]farewell // by serial: sessions that their clients have ended

	spare [32][][]byte // buffers for reuse, by binary logarithm of the size

	etcd   *etcd
	Counts Counts
}

// Counts of one schedule, or the sum of many.
type Counts struct {
	Chains, Calls, Operations, Unknown, Failed                 uint64
	Pauses, Cuts, ClientKills, NodeKills, CtlKills, Callbacks  uint64
	Sessions, Collects, Repairs, Checks, Loads, Leftovers, Max uint64
	Revokes, Leaves, Fences                                    uint64
	// Late are chains of sessions that their clients had given up, and no node had fenced.
	Late uint64
	// Counted are calls on the counter that were done, Helped those of all objects that nodes have executed.
	Counted, Helped uint64
	// Sets that were given back whole, and that were found lost.
	SetsWhole, SetsLost uint64
	// Watches are those that began, Watched their events.
	Watches, Watched uint64
	Owners           uint64 // of the pool
	// Names are changes of names that were done, Entries those that followers have returned, NameLate streams that were given up because
	// a heartbeat has shown that they missed a change.
	Names, Entries, NameLate uint64
	// Replaced are trees that were replaced, NamedPuts keys that were put into what the name stood for.
	Replaced, NamedPuts uint64
}

// lent is a node's memory.
type lent struct {
	proc   *Proc
	access *host.Access
}

// Proc is a process: it can stand still and it can die.
type Proc struct {
	*dice  // of its delays
	w      *World
	Name   string
	ctx    context.Context
	cancel context.CancelFunc

	// Guarded by World.mu.
	paused time.Time // until
	// A fault that strikes at one of the next chains, not at a random moment: most of
	// the time a client does nothing.
	countdown int
	at        func(*rdma.Chain) bool // which chains count; nil: all
	strike    func()
}

// farewell is how a client has ended a session.
type farewell uint8

const (
	present farewell = iota
	givenUp          // it cannot say what has happened to what it has posted
	closed           // in good order: no call runs, and nothing is posted any more
)

// longest bounds a schedule, so that a wait without an end fails it.
const longest = 20 * time.Minute

// A bubble's time begins with the year 2000.
func init() { clock.StartAt(time.Date(1999, 12, 31, 23, 0, 0, 0, time.UTC)) }

func newWorld(seed uint64, o Options) *World {
	w := &World{opt: o, begun: time.Now(), seed: seed, dice: newDice(seed, "work"), fate: newDice(seed, "fate"), servers: map[string]*served{}, lent: map[string]*lent{},
		cuts: map[[2]*Proc]time.Time{}, links: map[*link]struct{}{}, over: map[uint64]farewell{}}
	w.ctx, w.cancel = context.WithTimeout(context.Background(), longest)
	w.record = &recorder{w: w}
	w.log = slog.New(w.record)
	w.wild.Store(&wildness{}) // nothing is late or lost before the clients begin
	w.etcdProc = w.proc("etcd")
	w.etcd = newEtcd(w)
	return w
}

func (w *World) proc(name string) *Proc {
	p := &Proc{w: w, Name: name, dice: newDice(w.seed, name)}
	p.ctx, p.cancel = context.WithCancel(w.ctx)
	return p
}

func (p *Proc) isDead() bool { return p.ctx.Err() != nil }

// Kill ends a process: nothing that it has not sent yet is sent, what it has sent is.
func (p *Proc) Kill() {
	w := p.w
	w.mu.Lock()
	for h, s := range w.servers {
		if s.proc == p {
			delete(w.servers, h)
		}
	}
	for a, l := range w.lent {
		if l.proc == p {
			delete(w.lent, a)
		}
	}
	var ends []*link
	for l := range w.links {
		if l.from == p {
			ends = append(ends, l)
		}
		if l.to == p && w.fate.chance(2) && !l.broken { // else its host has died with it
			l.broken = true
			close(l.reset)
		}
	}
	w.mu.Unlock()
	p.cancel()
	for _, l := range ends {
		if w.fate.chance(2) { // else its host has died with it, and the node learns nothing
			l.close()
		}
	}
}

// breakLinks resets the connections of a process to nodes.
func (w *World) breakLinks(p *Proc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for l := range w.links {
		if l.from == p && !l.broken {
			l.broken = true
			close(l.reset)
		}
	}
}

// wire is the network as a process sees it.
func (w *World) wire(p *Proc) *wire.Wire {
	return &wire.Wire{
		HTTP:   transport{w, p},
		Fabric: dialer{w, p},
		Random: p.uint64,
		Serve: func(url string, h http.Handler) func() {
			host := strings.TrimPrefix(url, "http://")
			s := &served{p, h}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.servers[host] = s
			return func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				if w.servers[host] == s {
					delete(w.servers, host)
				}
			}
		},
		Lend: func(address string, a *host.Access) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if !p.isDead() {
				w.lent[address] = &lent{p, a}
			}
		},
	}
}

func (w *World) enlist(l *link) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.links[l] = struct{}{}
}

func (w *World) delist(l *link) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.links, l)
}

// dice are one stream of choices. Clients' work, faults and the delays of each process
// have streams of their own: one choice more in one of them does not change the others.
type dice struct {
	mu  sync.Mutex
	rng *rand.Rand
}

func newDice(seed uint64, stream string) *dice {
	h := fnv.New64a()
	h.Write([]byte(stream))
	return &dice{rng: rand.New(rand.NewPCG(seed, h.Sum64()))}
}

func (d *dice) uint64() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.Uint64()
}

func (d *dice) intn(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

// chance is true once in n; never for 0.
func (d *dice) chance(n int) bool { return n > 0 && d.intn(n) == 0 }

// between draws a duration.
func (d *dice) between(lo, hi time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	return lo + time.Duration(d.rng.Int64N(int64(hi-lo)))
}

// span is a duration, short ones more often.
func (d *dice) span(most time.Duration) time.Duration {
	switch d.intn(3) {
	case 0:
		most /= 10
	case 1:
		most /= 3
	}
	return d.between(most/10, most)
}

// delay of a message: mostly some ten microseconds, rarely much more. Two are hardly
// ever equal, so that the order of events follows from the seed.
func (p *Proc) delay() time.Duration {
	most := 100 * time.Microsecond
	switch n := p.intn(1000); {
	case n < p.w.wild.Load().Late:
		most = 300 * time.Millisecond
	case n < 20:
		most = 3 * time.Millisecond
	}
	return 5*time.Microsecond + p.between(0, most)
}

// count adds one to a counter.
func (w *World) count(n *uint64) {
	w.mu.Lock()
	*n++
	w.mu.Unlock()
}

// pause lets time pass.
func (w *World) pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hop carries a message; nil when it has arrived. A process that stands still sends
// and receives nothing; a link that is cut carries it once it is whole again.
func (w *World) hop(ctx context.Context, from, to *Proc) error {
	if from.isDead() { // what still computes there is cut off: let it not spin
		_ = w.pause(ctx, deadDelay)
		return errReset
	}
	if err := w.pause(ctx, time.Until(w.sendTime(from, 0))); err != nil {
		return err
	}
	for {
		until, dead := w.blocked(from, to)
		if dead {
			return dialError()
		}
		wait := time.Until(until)
		if wait <= 0 {
			return nil
		}
		if err := w.pause(ctx, wait+to.delay()); err != nil {
			return err
		}
	}
}

const deadDelay = 200 * time.Millisecond

// sendTime is when a message arrives that a process sends now.
func (w *World) sendTime(from *Proc, bytes int) time.Time {
	d := from.delay()
	if bytes > 0 {
		d += time.Duration(bytes) * w.opt.PerByte
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	at := time.Now()
	if from.paused.After(at) {
		at = from.paused
	}
	return at.Add(d)
}

// blocked is until when nothing arrives from one process at another.
func (w *World) blocked(from, to *Proc) (until time.Time, dead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	until = to.paused
	if c := w.cuts[[2]*Proc{from, to}]; c.After(until) {
		until = c
	}
	return until, to.isDead()
}

// Pause stops a process for some time.
func (w *World) Pause(p *Proc, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	until := time.Now().Add(d)
	if until.After(p.paused) {
		p.paused = until
	}
	w.cures(until)
	w.Counts.Pauses++
}

// Strike has a fault happen when a process posts one of its next n chains, or after
// some time if it posts so few.
func (w *World) Strike(p *Proc, n int, f func()) {
	w.StrikeAt(p, n, nil, f)
	time.AfterFunc(2*time.Second, func() { w.posted(p, n, nil) })
}

// StrikeAt has a fault happen when a process posts one of its next n chains of a kind.
func (w *World) StrikeAt(p *Proc, n int, at func(*rdma.Chain) bool, f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.countdown, p.at, p.strike = 1+w.fate.intn(n), at, f
}

// posted counts n chains of a process, of which ch is one; nil: time has passed.
func (w *World) posted(p *Proc, n int, ch *rdma.Chain) {
	w.mu.Lock()
	var f func()
	if p.strike != nil && (p.at == nil || ch != nil && p.at(ch)) {
		if p.countdown -= n; p.countdown <= 0 {
			f, p.strike = p.strike, nil
		}
	}
	w.mu.Unlock()
	if f != nil {
		f()
	}
}

// Cut cuts the link from one process to another.
func (w *World) Cut(from, to *Proc, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	until := time.Now().Add(d)
	w.cuts[[2]*Proc{from, to}] = until
	w.cures(until)
	w.Counts.Cuts++
}

func (w *World) cures(at time.Time) {
	if at.After(w.lastCure) {
		w.lastCure = at
	}
}

// cured is when the last fault so far ends.
func (w *World) cured() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lastCure
}

// heal ends every pause and cut.
func (w *World) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.cuts)
	w.wild.Store(&wildness{})
}

// now is the time since the schedule began.
func (w *World) now() time.Duration { return time.Since(w.begun) }

// fail notes a broken promise.
func (w *World) fail(format string, args ...any) {
	s := fmt.Sprintf("%v ", w.now().Round(time.Microsecond)) + fmt.Sprintf(format, args...)
	w.mu.Lock()
	w.problems = append(w.problems, s)
	w.mu.Unlock()
	w.log.Error("FAIL " + s)
}

func (w *World) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.problems) > 0
}

func isBroken(err error) bool  { return errors.Is(err, rdma.ErrBroken) }
func isRevoked(err error) bool { return errors.Is(err, rdma.ErrRevoked) }
func isRefused(err error) bool { return errors.Is(err, rdma.ErrRefused) }
func isKey(err error) bool     { return errors.Is(err, rdma.ErrKey) }

// recorder keeps the last lines of the log.
type recorder struct {
	w     *World
	mu    sync.Mutex
	lines []string
}

const recorded = 400

func (r *recorder) Enabled(_ context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || r.w.opt.Log != nil
}
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler { return r }
func (r *recorder) WithGroup(string) slog.Handler      { return r }

func (r *recorder) Handle(_ context.Context, rec slog.Record) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%12v %s", r.w.now().Round(time.Microsecond), rec.Message)
	rec.Attrs(func(a slog.Attr) bool { fmt.Fprintf(&b, " %s=%v", a.Key, a.Value); return true })
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.lines) >= 2*recorded {
		r.lines = append(r.lines[:0], r.lines[len(r.lines)-recorded:]...)
	}
	r.lines = append(r.lines, b.String())
	if r.w.opt.Log != nil {
		fmt.Fprintln(r.w.opt.Log, b.String())
	}
	return nil
}

// add sums up.
func (c *Counts) add(o *Counts) {
	c.Chains += o.Chains
	c.Calls += o.Calls
	c.Operations += o.Operations
	c.Unknown += o.Unknown
	c.Failed += o.Failed
	c.Pauses += o.Pauses
	c.Cuts += o.Cuts
	c.ClientKills += o.ClientKills
	c.NodeKills += o.NodeKills
	c.CtlKills += o.CtlKills
	c.Callbacks += o.Callbacks
	c.Sessions += o.Sessions
	c.Collects += o.Collects
	c.Repairs += o.Repairs
	c.Checks += o.Checks
	c.Loads += o.Loads
	c.Leftovers += o.Leftovers
	c.Revokes += o.Revokes
	c.Leaves += o.Leaves
	c.Fences += o.Fences
	c.Counted += o.Counted
	c.Helped += o.Helped
	c.SetsWhole += o.SetsWhole
	c.SetsLost += o.SetsLost
	c.Watches += o.Watches
	c.Watched += o.Watched
	c.Owners += o.Owners
	c.Names += o.Names
	c.Entries += o.Entries
	c.NameLate += o.NameLate
	c.Replaced += o.Replaced
	c.NamedPuts += o.NamedPuts
	c.Late += o.Late
}

// buffer is memory of a chain; recycle gives it back. Its contents are never read.
func (w *World) buffer(n int) []byte {
	if n < 1<<14 {
		return make([]byte, n)
	}
	class := bits.Len(uint(n - 1))
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := len(w.spare[class]); l > 0 {
		b := w.spare[class][l-1]
		w.spare[class] = w.spare[class][:l-1]
		return b[:n]
	}
	return make([]byte, n, 1<<class)
}

func (w *World) recycle(b []byte) {
	if c := cap(b); c >= 1<<14 && c&(c-1) == 0 {
		class := bits.Len(uint(c - 1))
		w.mu.Lock()
		w.spare[class] = append(w.spare[class], b)
		w.mu.Unlock()
	}
}
