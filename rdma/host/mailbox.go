package host

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/futex"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/msg"
)

// Procedure is what a client calls by a message. It puts its answer into answer, msg.MaxPayload bytes long, and returns its
// length. The text of an error goes to the client. It runs in the goroutine that serves the lane, and a fence of the
// session waits for its end: it must be short. request and answer are not kept.
type Procedure func(from *rdma.Ticket, request, answer []byte) (n int, err error)

// Handle makes a procedure known under a number.
// Preconditions: nothing is served yet.
func (a *Access) Handle(number uint16, p Procedure) { a.procedures[number] = p }

// Held is what a procedure returns that has changed nothing and has no answer yet. It is asked again, with the same request,
// when Ready has a value, or at Until in clock.Now time. Held calls do not hold up a fence.
type Held struct {
	Ready <-chan struct{}
	Until int64
}

func (*Held) Error() string        { return msg.ErrHeld.Error() }
func (*Held) Is(target error) bool { return target == msg.ErrHeld }

// ErrHeld is the answer of Run to a chain that looks for the answer of a held call: see AwaitHeld.
var ErrHeld = errors.New("the answer is held")

// errNoHold refuses a call that would be held.
var errNoHold = errors.New("this call waits at the node for its answer: only connections over tcp can do that")

// AwaitHeld waits until the held call is to be asked again. Then run the rest of the chain that Run has answered with ErrHeld. Neither side
// polls meanwhile.
func (l *Lane) AwaitHeld(ctx context.Context) error {
	h := l.messages.held()
	if h == nil {
		return nil
	}
	t := time.NewTimer(time.Duration(h.Until - clock.Now()))
	defer t.Stop()
	select {
	case <-h.Ready:
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// echo answers what it was asked.
func echo(_ *rdma.Ticket, request, answer []byte) (int, error) { return copy(answer, request), nil }

// mailboxID names a mailbox: a lane of a session has one, which outlives the lane's connections.
type mailboxID struct {
	serial uint64 // of the ticket
	lane   uint32 // within the session
}

// mailbox is the node's end of one. Guarded by Access.mu, but for what memory and server hold, which are the lane's.
type mailbox struct {
	nonce  uint64      // chosen by the client that has opened it
	key    uint64      // of its window; of the node's choice, so that no mailbox of another incarnation is taken for it
	memory *Memory     // msg.MailboxBytes
	server *msg.Server // of the nonce
	lane   *Lane       // that has opened it last
}

// messages is a lane's end of a mailbox.
type messages struct {
	box  *mailbox // nil: not opened
	slot int32    // of its window
	run  msg.Run  // executes a procedure for the lane's client

	holds bool // the provider waits for held calls

	// serving is held from enter to leave, and while the lane opens its mailbox: over verbs another goroutine does that. It is taken before
	// Access.mu, which procedures take.
	serving sync.Mutex

	// The gate of doc.go once more, of which the client process of a shm lane has no part: busy is odd while procedures
	// run, shut says why none runs any more.
	busy atomic.Uint64
	shut atomic.Uint64
}

// shutGate ends all of a lane's access, and its messages with it.
func (l *Lane) shutGate(why uint64) {
	if why == revoked {
		l.messages.shut.Store(revoked)
	} else {
		l.messages.shut.CompareAndSwap(open, why)
	}
	l.page.shutGate(why)
}

// drain returns nil when no procedure runs that ran when it was called.
// Preconditions: the lane's gate is shut, or procedures may go on.
func (m *messages) drain(ctx context.Context) error {
	seen := m.busy.Load()
	for w := (wait{}); seen&1 != 0 && m.busy.Load() == seen; w.pause() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("a procedure is still running: %w", err)
		}
	}
	return nil
}

// openMailbox gives the lane its mailbox: the one that it has had under the nonce, with the answers in it, or a new one. A procedure that the lane
// runs ends before.
func (l *Lane) openMailbox(nonce uint64, slot int32) (rdma.Window, *Memory, error) {
	a, id := l.access, mailboxID{l.ticket.Serial, l.number}
	if err := a.makeMailbox(id); err != nil {
		return rdma.Window{}, nil, err
	}
	l.messages.serving.Lock()
	defer l.messages.serving.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := l.why(nil); err != nil {
		return rdma.Window{}, nil, err
	}
	if l.messages.shut.Load() != open { // whatever the page says: another lane may have the mailbox
		return rdma.Window{}, nil, rdma.ErrBroken
	}
	b := a.mailboxes[id]
	if b == nil { // others needed the room meanwhile
		return rdma.Window{}, nil, rdma.ErrFull
	}
	for other, at := range l.slots {
		if at == slot && other != rdma.Mailbox || at != slot && other == rdma.Mailbox {
			return rdma.Window{}, nil, rdma.ErrLimit // one slot for each
		}
	}
	if b.server != nil && b.nonce == nonce {
		b.server.Resume()
	} else {
		var key [8]byte
		rand.Read(key[:])
		b.nonce, b.key = nonce, binary.LittleEndian.Uint64(key[:])|1
		b.server = msg.NewServer(&mailMemory{b.memory.mem}, nonce)
	}
	b.lane = l
	l.messages.box, l.messages.slot = b, slot
	l.messages.run = l.procedure
	l.slots[rdma.Mailbox] = slot
	l.Map(slot, b.key, b.memory.mem, pmem.Flusher{})
	atomic.StoreUint64(&l.page.keys[slot], b.key)
	if l.process != nil {
		answered := halfAt(b.memory.mem, msg.AnsweredOff)
		b.server.WakeBy(func() { futex.Wake(answered) })
	} else {
		b.server.WakeBy(nil)
	}
	if l.process != nil || l.provider == "verbs" {
		b.server.Sleep(false) // the client's verbs run without this process: it has to be woken
	}
	return rdma.Window{Region: rdma.Mailbox, Epoch: nonce, Key: b.key, Bytes: msg.MailboxBytes, Slot: slot, Verifies: true}, b.memory, nil
}

// makeMailbox makes the memory of a mailbox unless there is one, in the room of one whose lane has left if need be.
func (a *Access) makeMailbox(id mailboxID) error {
	a.mu.Lock()
	known, full := a.mailboxes[id] != nil, len(a.mailboxes) >= a.limits.Mailboxes
	var old *mailbox
	if !known && full {
		for other, b := range a.mailboxes {
			if b.lane == nil || b.lane.removed.Load() {
				old = b
				delete(a.mailboxes, other)
				break
			}
		}
	}
	a.mu.Unlock()
	switch {
	case known:
		return nil
	case full && old == nil:
		return rdma.ErrFull
	case old != nil:
		if err := old.memory.Close(); err != nil {
			return err
		}
	}
	m, err := NewMemory("mailbox", msg.MailboxBytes)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.mailboxes[id] != nil || !a.ended.Admits(id.serial) {
		return errors.Join(rdma.ErrBroken, m.Close())
	}
	a.mailboxes[id] = &mailbox{memory: m}
	return nil
}

// dropMailboxes forgets mailboxes, and with them what was executed.
// Preconditions: their lanes have been removed.
func (a *Access) dropMailboxes(which func(mailboxID) bool) error {
	a.mu.Lock()
	var gone []*mailbox
	for id, b := range a.mailboxes {
		if which(id) && (b.lane == nil || b.lane.removed.Load()) {
			gone = append(gone, b)
			delete(a.mailboxes, id)
		}
	}
	a.mu.Unlock()
	var errs []error
	for _, b := range gone {
		errs = append(errs, b.memory.Close())
	}
	return errors.Join(errs...)
}

// procedure executes what the lane's client has called.
func (l *Lane) procedure(number uint16, request, answer []byte) (int, error) {
	p := l.access.procedures[number]
	if p == nil {
		return 0, msg.ErrProcedure
	}
	n, err := p(&l.ticket, request, answer)
	if _, ok := err.(*Held); ok && !l.messages.holds {
		return 0, errNoHold
	}
	return n, err
}

// held is what the call waits for that the mailbox holds; nil: it holds none. It is for the goroutine that serves the lane.
func (m *messages) held() *Held {
	h, _ := m.box.server.Held().(*Held)
	return h
}

// enter marks that the node's end of the mailbox is in use, unless the lane's access has ended.
func (m *messages) enter() error {
	m.serving.Lock()
	m.busy.Add(1) // 1, see doc.go
	why := m.shut.Load()
	switch {
	case why == open && m.box != nil:
		return nil
	case why == revoked:
		m.leave()
		return rdma.ErrRevoked
	}
	m.leave()
	return rdma.ErrBroken
}

// isShut says whether the lane's access has ended, for each procedure of one Serve.
func (m *messages) isShut() bool { return m.shut.Load() != open }

func (m *messages) leave() {
	m.busy.Add(1)
	m.serving.Unlock()
}

// Serve executes the requests that have come into the lane's mailbox, and answers them. It is for the goroutine that
// serves the lane. An error ends the lane.
func (l *Lane) Serve() (served int, err error) {
	m := &l.messages
	if err := m.enter(); err != nil {
		return 0, err
	}
	served, err = m.box.server.Serve(m.run, m.isShut)
	m.leave()
	if err != nil { // what a correct client never does
		l.shutGate(closed)
		return served, errors.Join(l.offend(rdma.ErrLimit), err)
	}
	return served, nil
}

// ServeUntilQuiet serves the lane's mailbox until nothing has come for so long, and tells the client then that the node
// sleeps and has to be woken. It is for the goroutine that serves a lane whose verbs run in another process.
func (l *Lane) ServeUntilQuiet(quiet time.Duration) error {
	if err := l.wake(); err != nil {
		return err
	}
	for {
		if err := l.serveUntilQuiet(quiet); err != nil {
			return err
		}
		if err := l.sleep(false); err != errCame {
			return err
		}
	}
}

// serveUntilQuiet serves the lane's mailbox until nothing has come for so long.
func (l *Lane) serveUntilQuiet(quiet time.Duration) error {
	for last := clock.Now(); ; {
		n, err := l.Serve()
		if err != nil {
			return err
		}
		now := clock.Now()
		if n > 0 {
			last = now
		}
		if now-last > int64(quiet) {
			return nil
		}
	}
}

// errCame: the node may not sleep.
var errCame = errors.New("a request has come")

// sleep tells the client that the node sleeps, and whether in a thread. errCame: it may not.
func (l *Lane) sleep(thread bool) error {
	m := &l.messages
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	if !m.box.server.Sleep(thread) {
		return errCame
	}
	return nil
}

// wake tells the client that the node looks by itself.
func (l *Lane) wake() error {
	m := &l.messages
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	m.box.server.Wake()
	return nil
}

// runMessages executes a chain on the mailbox in this process. What its WRITEs bring is served before its READs look for the
// answer, so that a call takes one round trip. ErrHeld: the rest of the chain is to be run behind AwaitHeld.
func (l *Lane) runMessages(slot int32, key uint64, verbs []rdma.Verb) (done int, err error) {
	first := 0
	for first < len(verbs) && verbs[first].Op == rdma.Write {
		first++
	}
	if first > 0 {
		done, err = l.Runner.Run(slot, key, verbs[:first])
	}
	if err == nil && (first > 0 || l.messages.held() != nil) {
		_, err = l.Serve()
	}
	if err == nil && first < len(verbs) && l.messages.held() != nil {
		return done, ErrHeld
	}
	if err == nil && first < len(verbs) {
		var read int
		read, err = l.Runner.Run(slot, key, verbs[first:])
		done += read
	}
	if err != nil && errors.Is(err, rdma.ErrRefused) {
		l.note(err)
	}
	return done, err
}

// mailMemory is a mailbox as the node's processors reach it.
type mailMemory struct{ mem []byte }

func (m *mailMemory) Word(off uint64) uint64     { return atomic.LoadUint64(wordAt(m.mem, off)) }
func (m *mailMemory) Set(off, word uint64)       { atomic.StoreUint64(wordAt(m.mem, off), word) }
func (m *mailMemory) Load(off uint64, b []byte)  { copyOut(b, m.mem, off) }
func (m *mailMemory) Store(off uint64, b []byte) { copyIn(m.mem, off, b) }
