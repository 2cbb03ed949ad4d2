package msg

import (
	"errors"
	"fmt"
)

// ErrOffence: the mailbox holds what a correct client does not write. Nothing of it was executed.
var ErrOffence = errors.New("mailbox: not what a client writes")

// ErrProcedure: the node has no procedure of this number. Nothing ran.
var ErrProcedure = errors.New("the node has no such procedure")

// ErrHeld is what a procedure returns that has no answer yet, and has changed nothing: Serve asks it again, with the same
// request, each time that it is called. A mailbox holds one call at a time, whose request has at most MaxHeld bytes; others
// are refused.
var ErrHeld = errors.New("no answer yet")

// MaxHeld is the longest request of a call that is held.
const MaxHeld = 64

// Memory is a mailbox as its node reaches it.
type Memory interface {
	// Word loads an aligned word. Loads behind it in program order see what was stored before that word.
	Word(off uint64) uint64
	// Set stores an aligned word. Every earlier store is visible before it; a later Word is ordered behind it.
	Set(off, word uint64)
	// Load copies bytes out, Store copies bytes in.
	Load(off uint64, b []byte)
	Store(off uint64, b []byte)
}

// Run executes a procedure: it puts its answer into answer, MaxPayload bytes long, and returns its length. The text of
// an error goes to the client; ErrProcedure says that there is no such procedure.
type Run func(procedure uint16, request, answer []byte) (n int, err error)

// Server is the node's end of a mailbox. One goroutine at a time uses it.
type Server struct {
	mem     Memory
	attempt uint64 // of every cookie
	// executed is the cookie of the latest request of each slot that was executed, or is being executed.
	// Invariant: it never falls, and a cookie enters it once, before its procedure runs.
	executed [Slots]uint64
	next     uint64 // slot to look at first
	sleeps   uint64 // number of the present sleep, or of the next
	held     heldCall
	answered uint64 // answers stored while bell was set, and 1
	listened uint64 // number of the client's sleep that bell was called for last
	// bell wakes a client that sleeps until the word AnsweredOff changes; nil: clients do not sleep there.
	bell func()
	in   [SlotBytes]byte
	out  [SlotBytes]byte
}

// heldCall is the call that its procedure holds; a cookie of 0: none.
type heldCall struct {
	cookie    uint64
	procedure uint16
	bytes     int
	request   [MaxHeld]byte
	why       error // of its procedure: an ErrHeld
}

// NewServer serves a new mailbox, whose memory may have been another one's. The nonce is what its client has chosen.
func NewServer(mem Memory, nonce uint64) *Server {
	s := &Server{mem: mem, attempt: nonce & attemptMask, sleeps: 1, answered: 1}
	s.clear()
	return s
}

// clear takes the valid words of an earlier mailbox away.
func (s *Server) clear() {
	for slot := range uint64(Slots) {
		s.mem.Set(requestOff(slot)+validOff, 0)
		s.mem.Set(answerOff(slot)+validOff, 0)
	}
	for _, off := range [...]uint64{asleepOff, BellOff, AnsweredOff, listensOff} {
		s.mem.Set(off, 0)
	}
}

// WakeBy has the node wake a client that sleeps in a thread of its own until the word AnsweredOff changes; nil: the node wakes no client.
func (s *Server) WakeBy(bell func()) {
	if s.bell = bell; bell != nil {
		s.mem.Set(AnsweredOff, s.answered)
	} else {
		s.mem.Set(AnsweredOff, 0)
	}
}

// Serve executes every request that has come, and answers it. It looks at shut before each procedure: none starts once
// shut returns true, and what was not executed stays so. shut may be nil. An error is an ErrOffence: the mailbox is not to be served
// any more.
//
// Linearizes at: the store into executed, for "has been executed"; what a procedure changes has its own point.
func (s *Server) Serve(run Run, shut func() bool) (served int, err error) {
	if shut == nil {
		shut = func() bool { return false }
	}
	if h := &s.held; h.cookie != 0 && !shut() {
		h.why = s.answer(&message{cookie: h.cookie, procedure: h.procedure, payload: h.request[:h.bytes]}, run)
		if h.why == nil {
			h.cookie = 0
			served++
		}
	}
	first := s.next
	for i := range uint64(Slots) {
		slot := (first + i) % Slots
		cookie := s.mem.Word(requestOff(slot) + validOff)
		if cookie == 0 || cookie == s.executed[slot] {
			continue
		}
		if shut() {
			break
		}
		if err := s.one(slot, cookie, run); err != nil {
			return served, err
		}
		served++
		s.next = (slot + 1) % Slots
	}
	return served, nil
}

// one executes the request that a valid word announces.
func (s *Server) one(slot, cookie uint64, run Run) error {
	if cookie>>sequenceBits != s.attempt || slotOf(cookie) != slot || cookie < s.executed[slot] {
		return fmt.Errorf("%w: cookie %#x in slot %d of attempt %#x behind cookie %#x", ErrOffence, cookie, slot, s.attempt, s.executed[slot])
	}
	// Every byte is read once, into private memory: the client may change what lies in the mailbox.
	s.mem.Load(requestOff(slot), s.in[:headBytes])
	n, err := payloadBytes(s.in[:])
	if err == nil {
		s.mem.Load(requestOff(slot)+headBytes, s.in[headBytes:headBytes+n])
	}
	var q message
	if err == nil {
		q, err = decode(s.in[:], cookie, requestSeed)
	}
	if err != nil {
		return fmt.Errorf("%w: slot %d: %w", ErrOffence, slot, err)
	}
	s.executed[slot] = cookie
	why := s.answer(&q, run)
	if why == nil {
		return nil
	}
	if h := &s.held; h.cookie == 0 && len(q.payload) <= MaxHeld {
		h.cookie, h.procedure, h.bytes, h.why = cookie, q.procedure, copy(h.request[:], q.payload), why
		return nil
	}
	s.refuse(&q, "the mailbox holds another call, or the request is too long to be held")
	return nil
}

// answer runs the procedure of a request and stores its answer. An ErrHeld of the procedure is returned: there is no answer yet.
func (s *Server) answer(q *message, run Run) (held error) {
	a := message{cookie: q.cookie, procedure: q.procedure}
	answer := s.out[headBytes : headBytes+MaxPayload]
	n, err := run(q.procedure, q.payload, answer)
	switch {
	case errors.Is(err, ErrHeld):
		return err
	case errors.Is(err, ErrProcedure):
		a.status, n = statusUnknown, 0
	case err != nil:
		a.status, n = statusRefused, copy(answer, err.Error())
	}
	a.payload = answer[:n]
	s.store(&a)
	return nil
}

// Held is the ErrHeld that the procedure of the held call has returned last; nil: no call is held.
func (s *Server) Held() error {
	if s.held.cookie == 0 {
		return nil
	}
	return s.held.why
}

// refuse answers a request with the text of an error.
func (s *Server) refuse(q *message, why string) {
	s.store(&message{cookie: q.cookie, procedure: q.procedure, status: statusRefused, payload: []byte(why)})
}

// store puts an answer into the slot of its call, the valid word last.
func (s *Server) store(a *message) {
	body := a.put(s.out[:], answerSeed)
	at := answerOff(slotOf(a.cookie))
	s.mem.Store(at, s.out[:body])
	s.mem.Set(at+validOff, a.cookie)
	if s.bell == nil {
		return
	}
	s.answered++
	s.mem.Set(AnsweredOff, s.answered)
	if n := s.mem.Word(listensOff); n != 0 && n != s.listened {
		s.listened = n
		s.bell()
	}
}

// Resume takes the mailbox over for the lane's next connection. Requests that were not executed are given up, so that
// what the client leaves unsaid after its Reset never runs; answers stay. A call that is held is refused.
// Preconditions: nothing posted over the former connection can still run, and no Serve is under way.
func (s *Server) Resume() {
	if h := &s.held; h.cookie != 0 {
		s.refuse(&message{cookie: h.cookie, procedure: h.procedure}, "the connection was reset while the call was held")
		h.cookie = 0
	}
	for slot := range uint64(Slots) {
		if at := requestOff(slot) + validOff; s.mem.Word(at) != s.executed[slot] {
			s.mem.Set(at, s.executed[slot])
		}
	}
}

// Sleep tells clients that they have to wake the node. It returns false, and the node has to go on, if a request has come
// meanwhile. The client stores its request, then looks for the word; the node stores the word, then looks for a
// request: one of the two sees the other. Each sleep has a number, so that a client wakes the node once in it. A sleep that has found a request
// leaves its number to the next one, because a client may have seen it.
//
// thread: a thread of the node sleeps on the word BellOff, as long as Rung does not say that the client has ended this sleep.
//
// Invariant: a client wakes the node at most once between two calls of Wake.
func (s *Server) Sleep(thread bool) bool {
	asleep := s.sleeps
	if thread {
		asleep |= inThread
	}
	s.mem.Set(asleepOff, asleep)
	for slot := range uint64(Slots) {
		if cookie := s.mem.Word(requestOff(slot) + validOff); cookie != 0 && cookie != s.executed[slot] {
			s.mem.Set(asleepOff, 0)
			return false
		}
	}
	return true
}

// Rung is what the client has stored in the word BellOff, and whether that ends the present sleep. The thread that is about to sleep compares
// the word again, in the kernel: it sleeps only while the word is what Rung has returned. The client stores the word before it wakes the
// thread, so it finds the thread asleep or has it find the word.
func (s *Server) Rung() (word uint32, ended bool) {
	word = uint32(s.mem.Word(BellOff))
	return word, word == uint32(s.sleeps)
}

// Wake tells clients that the node looks by itself: a client has woken it.
func (s *Server) Wake() {
	s.sleeps++
	s.mem.Set(asleepOff, 0)
}
