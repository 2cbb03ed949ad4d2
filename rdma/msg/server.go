package msg

import (
	"errors"
	"fmt"
)

// ErrOffence: the mailbox holds what a correct client does not write. Nothing of it was executed.
var ErrOffence = errors.New("mailbox: not what a client writes")

// Echo is the procedure that answers what it was asked. Every node has it.
const Echo = 1

// ErrProcedure: the node has no procedure of this number. Nothing ran.
var ErrProcedure = errors.New("the node has no such procedure")

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
	in       [SlotBytes]byte
	out      [SlotBytes]byte
}

// NewServer serves a new mailbox, whose memory may have been another one's. The nonce is what its client has chosen.
func NewServer(mem Memory, nonce uint64) *Server {
	s := &Server{mem: mem, attempt: nonce & attemptMask}
	s.clear()
	return s
}

// clear takes the valid words of an earlier mailbox away.
func (s *Server) clear() {
	for slot := range uint64(Slots) {
		s.mem.Set(requestOff(slot)+validOff, 0)
		s.mem.Set(answerOff(slot)+validOff, 0)
	}
	s.mem.Set(asleepOff, 0)
}

// Serve executes every request that has come, and answers it. An error is an ErrOffence: the mailbox is not to be served
// any more.
//
// Linearizes at: the store into executed, for "has been executed"; what a procedure changes has its own point.
func (s *Server) Serve(run Run) (served int, err error) {
	first := s.next
	for i := range uint64(Slots) {
		slot := (first + i) % Slots
		cookie := s.mem.Word(requestOff(slot) + validOff)
		if cookie == 0 || cookie == s.executed[slot] {
			continue
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
	a := message{cookie: cookie, procedure: q.procedure}
	answer := s.out[headBytes : headBytes+MaxPayload]
	n, err = run(q.procedure, q.payload, answer)
	switch {
	case errors.Is(err, ErrProcedure):
		a.status, n = statusUnknown, 0
	case err != nil:
		a.status, n = statusRefused, copy(answer, err.Error())
	}
	a.payload = answer[:n]
	body := a.put(s.out[:], answerSeed)
	s.mem.Store(answerOff(slot), s.out[:body])
	s.mem.Set(answerOff(slot)+validOff, cookie)
	return nil
}

// Resume takes the mailbox over for the lane's next connection. Requests that were not executed are given up, so that
// what the client leaves unsaid after its Reset never runs; answers stay.
// Preconditions: nothing posted over the former connection can still run, and no Serve is under way.
func (s *Server) Resume() {
	for slot := range uint64(Slots) {
		if at := requestOff(slot) + validOff; s.mem.Word(at) != s.executed[slot] {
			s.mem.Set(at, s.executed[slot])
		}
	}
}

// Sleep tells clients that they have to wake the node. It returns false, and the node has to go on, if a request has come
// meanwhile. The client stores its request, then looks for the word; the node stores the word, then looks for a
// request: one of the two sees the other.
func (s *Server) Sleep() bool {
	s.mem.Set(asleepOff, 1)
	for slot := range uint64(Slots) {
		if cookie := s.mem.Word(requestOff(slot) + validOff); cookie != 0 && cookie != s.executed[slot] {
			s.Wake()
			return false
		}
	}
	return true
}

// Wake tells clients that the node looks by itself.
func (s *Server) Wake() { s.mem.Set(asleepOff, 0) }
