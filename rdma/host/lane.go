package host

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

// Lane is the node's end of one connection.
type Lane struct {
	Runner
	access   *Access          // the node's; constant
	session  *session         // set by Access.enter, then constant
	ticket   rdma.Ticket      // of the hello; constant
	number   uint32           // within the session; constant
	attempt  uint64           // of the hello; a hello with a lower one does not take the lane's number
	provider string           // "tcp", "shm", "inproc" or "verbs"; constant
	process  *Process         // of a shm client
	stopOnce sync.Once        // around stopping
	stopping func()           // Entry.Stop, or nil
	removed  atomic.Bool      // Access.remove has run
	slots    map[uint32]int32 // index of each open window, by region; guarded by Access.mu
	messages messages         // the node's end of its mailbox; used by the goroutine that serves the lane, but for the gate
	way      way              // to the adapter, on nodes that serve verbs; with a lock of its own
}

// Entry is how a lane comes in.
type Entry struct {
	Provider string // name of the provider that the connection came over
	// Binding of the channel that the hello came over.
	Binding Binding
	// Stop wakes the goroutine that serves the lane when its access has been taken
	// away. When it returns, no memory is sent to the client any more. May be nil.
	Stop func()
	// Holds: the provider has chains that look for an answer wait with AwaitHeld, so that procedures may hold calls.
	Holds bool
	// Shared and Process are for shm: the gate page lies in this file, of PageBytes,
	// and chains run in this process, which the Lane closes after a successful Admit.
	Shared  *os.File
	Process *Process
}

// Admit takes in the lane of a hello, which answers the challenge. A lane of that number
// which is there already is ended first: when Admit returns, nothing of it can run.
func (a *Access) Admit(ctx context.Context, h *Hello, c *Challenge, e Entry) (*Lane, error) {
	if err := a.Check(h, c, e.Binding); err != nil {
		a.counters.badTickets.Add(1)
		return nil, err
	}
	return a.Adopt(ctx, &h.Ticket, h.Lane, h.Attempt, e)
}

// Adopt is Admit for a lane whose hello was checked elsewhere: a server of verbs has its lanes' mailboxes in an Access.
func (a *Access) Adopt(ctx context.Context, t *rdma.Ticket, number uint32, attempt uint64, e Entry) (*Lane, error) {
	if a.relay != nil && e.Shared != nil {
		return nil, rdma.ErrDomain
	}
	mem, err := mapPage(e.Shared)
	if err != nil {
		return nil, err
	}
	l := &Lane{access: a, ticket: *t, number: number, attempt: attempt, provider: e.Provider, process: e.Process, stopping: e.Stop, slots: make(map[uint32]int32)}
	l.messages.holds = e.Holds
	if err := l.init(mem, t.Rights); err != nil {
		return nil, err
	}
	for {
		old, err := a.enter(l, t)
		if err != nil {
			return nil, err
		}
		if old == nil {
			return l, nil
		}
		if err := a.finish(ctx, []*Lane{old}); err != nil {
			return nil, err
		}
	}
}

// errLate: the client has connected again since.
var errLate = fmt.Errorf("%w: a later connection has this lane", rdma.ErrBroken)

// enter adds a lane, or returns the one that is in its place, its gate shut.
func (a *Access) enter(l *Lane, t *rdma.Ticket) (old *Lane, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, rdma.ErrBroken
	}
	if !a.ended.Admits(t.Serial) {
		return nil, rdma.ErrRevoked
	}
	s := a.sessions[t.Serial]
	if s == nil {
		if !a.limits.Room(len(a.sessions), 0, l.number) && !a.evict() {
			return nil, rdma.ErrFull
		}
		s = &session{ticket: *t, lanes: make(map[uint32]*Lane), since: time.Now()}
		a.sessions[t.Serial] = s
	}
	if old := s.lanes[l.number]; old != nil {
		if old.attempt > l.attempt {
			return nil, errLate
		}
		old.shutGate(superseded)
		return old, nil
	}
	switch {
	case !s.room(t, l.number, a.limits.LanesPerSession):
		return nil, rdma.ErrLimit
	case !a.limits.Room(0, a.lanes, l.number):
		return nil, rdma.ErrFull
	}
	a.lanes++
	l.session = s
	s.lanes[l.number] = l
	a.counters.admitted.Add(1)
	return nil, nil
}

// room says whether a session may have another lane, of this number.
func (s *session) room(t *rdma.Ticket, number uint32, most int) bool {
	if number >= WatchLane && number < endOfHeld {
		return true
	}
	lanes := len(s.lanes)
	for n := uint32(WatchLane); n < endOfHeld; n++ {
		if s.lanes[n] != nil {
			lanes--
		}
	}
	return t.Room(lanes, most)
}

// Open gives the lane access to a region under an epoch, in a slot of the
// client's choice. ErrKey while the region is not served under that epoch, ErrTicket if it is another tenant's.
// The memory is for shm, which sends it to the client.
func (l *Lane) Open(number uint32, epoch uint64, slot int32) (rdma.Window, *Memory, error) {
	if slot < 0 || slot >= MaxWindows {
		return rdma.Window{}, nil, l.offend(rdma.ErrLimit)
	}
	if !l.ticket.Opens(number, epoch) {
		return rdma.Window{}, nil, l.offend(rdma.ErrTicket)
	}
	if number == rdma.Mailbox {
		return l.openMailbox(epoch, slot)
	}
	a := l.access
	if a.foreign(number, epoch, l.ticket.Tenant) {
		return rdma.Window{}, nil, l.offend(rdma.ErrTicket)
	}
	target, err := l.through(number, epoch)
	if err != nil {
		return rdma.Window{}, nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := l.why(nil); err != nil {
		return rdma.Window{}, nil, err
	}
	r := a.regions[number]
	if r == nil || r.memory == nil || r.epoch != epoch || r.tenant != l.ticket.Tenant {
		return rdma.Window{}, nil, rdma.ErrKey
	}
	for other, at := range l.slots {
		if at == slot && other != number || at != slot && other == number {
			return rdma.Window{}, nil, rdma.ErrLimit // one slot for each region
		}
	}
	if err := a.hold(l, r.memory); err != nil {
		return rdma.Window{}, nil, err
	}
	key := r.windowKey(l.session.ticket.Serial)
	l.slots[number] = slot
	l.Map(slot, key, r.memory.mem, r.memory.flush)
	l.windows[slot].target = target
	atomic.StoreUint64(&l.page.keys[slot], key)
	w := rdma.Window{Region: number, Epoch: epoch, Key: key, Bytes: uint64(len(r.memory.mem)), Slot: slot, Flush: l.flushMethod(r.memory), Verifies: target == nil || target.Window.Verifies}
	return w, r.memory, nil
}

// flushMethod is how the lane's client has a range of the memory made durable.
func (l *Lane) flushMethod(m *Memory) rdma.FlushMethod {
	switch {
	case !m.Persistent():
		return rdma.NoFlush
	case l.provider == "tcp":
		return rdma.Message
	}
	return rdma.Processor
}

// foreign says whether a region is served under an epoch, and not to a tenant.
func (a *Access) foreign(number uint32, epoch uint64, tenant uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.regions[number]
	return r != nil && r.memory != nil && r.epoch == epoch && r.tenant != tenant
}

// Run executes a chain and counts what it was refused for: a session that keeps
// trying what a correct client never does is ended.
func (l *Lane) Run(slot int32, key uint64, verbs []rdma.Verb) (done int, err error) {
	if l.messages.box != nil && slot == l.messages.slot {
		return l.runMessages(slot, key, verbs)
	}
	done, err = l.Runner.Run(slot, key, verbs)
	if err != nil {
		l.note(err)
	}
	if w := &l.access.watches; w.some.Load() && done > 0 {
		w.ran(verbs[:done])
	}
	return done, err
}

// offend counts an offence that did not come as far as a chain.
func (l *Lane) offend(err error) error {
	l.refuse(err, true)
	l.note(err)
	return err
}

// note ends the session after too many offences, of all its lanes together.
func (l *Lane) note(err error) {
	l.access.counters.refuse(err)
	if l.page.offence == 0 {
		return
	}
	a, s := l.access, l.session
	a.mu.Lock()
	offences := s.past.Offences
	for _, lane := range s.lanes {
		offences += peek(&lane.page.offence)
	}
	if offences > a.limits.Offences {
		if a.ended.Fence(s.ticket.Serial) {
			a.counters.expelled.Add(1)
		}
		for _, lane := range s.lanes {
			lane.shutGate(revoked)
		}
	}
	a.mu.Unlock()
}

// Ended is nil while the lane has access, else why it has none:
// ErrRevoked, or ErrBroken when the lane was dialled again or has left.
func (l *Lane) Ended() error { return l.why(nil) }

// Ticket is what the lane's hello showed.
func (l *Lane) Ticket() *rdma.Ticket { return &l.ticket }

// Leave ends the lane and returns when nothing of it executes.
func (l *Lane) Leave() {
	// Without a context nothing but the end of the chain, or of the process, stops it.
	l.LeaveBy(context.Background())
}

// LeaveBy is Leave that ends with ctx. After an error something of the lane may execute still: call again.
func (l *Lane) LeaveBy(ctx context.Context) error {
	l.shutGate(closed)
	return l.access.finish(ctx, []*Lane{l})
}

// ShutBy ends the lane's access and returns when nothing of it executes. Its mailbox stays until LeaveBy. After an error something of the lane
// may execute still: call again.
func (l *Lane) ShutBy(ctx context.Context) error {
	l.shutGate(closed)
	return drain(ctx, []*Lane{l}, l.access.limits.KillAfter)
}

// stop calls stopping, once, so that the provider ends the connection.
func (l *Lane) stop() {
	l.stopOnce.Do(func() {
		if l.stopping != nil {
			l.stopping()
		}
	})
}

// remove forgets a lane whose gate is shut and which executes nothing.
func (a *Access) remove(l *Lane) {
	if l.removed.Swap(true) {
		return
	}
	a.mu.Lock()
	s, u := l.session, l.usage()
	s.past.Add(u)
	a.past.Add(u)
	delete(s.lanes, l.number)
	a.lanes--
	if len(s.lanes) == 0 && a.sessions[s.ticket.Serial] == s && s.past.Offences == 0 {
		delete(a.sessions, s.ticket.Serial)
	}
	left := len(s.lanes) == 0 && !a.closed && a.ended.Admits(s.ticket.Serial)
	a.mu.Unlock()
	if left && a.left != nil {
		a.left(s.ticket.Serial)
	}
	if l.process != nil {
		l.process.Close()
	}
	l.way.close()
}

// mapPage maps the gate page of a lane: of its own, or shared with a client.
func mapPage(shared *os.File) ([]byte, error) {
	fd, flags := -1, unix.MAP_ANONYMOUS|unix.MAP_PRIVATE
	if shared != nil {
		fd, flags = int(shared.Fd()), unix.MAP_SHARED
	}
	mem, err := unix.Mmap(fd, 0, PageBytes, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		return nil, fmt.Errorf("gate page: mmap: %w", err)
	}
	return mem, nil
}

// NewSharedPage makes the file of a gate page for a shm client. Its size is sealed.
func NewSharedPage() (*os.File, error) {
	fd, err := unix.MemfdCreate("quarry-gate", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("gate page: memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "quarry-gate")
	if err = f.Truncate(PageBytes); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("gate page: %w", err)
	}
	return f, nil
}

// JoinPage maps the gate page that a node sent to a shm client.
func JoinPage(f *os.File) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("gate page: %w", err)
	}
	if st.Size() != PageBytes {
		return nil, fmt.Errorf("gate page of %d bytes, want %d: the node runs another version", st.Size(), PageBytes)
	}
	return mapPage(f)
}
