package msg

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
)

// ErrBusy: all slots of the mailbox are in use. Nothing was sent; receive an answer first.
var ErrBusy = errors.New("the mailbox is full: as many calls are under way as it has slots")

// ErrTooLong: the request, or the answer for the caller's buffer, is too long.
var ErrTooLong = errors.New("message too long")

// Refusal is the error that a procedure has returned on the node.
type Refusal struct {
	Procedure uint16 // that was called
	Text      string // of its error
}

func (r *Refusal) Error() string { return fmt.Sprintf("procedure %d: %s", r.Procedure, r.Text) }

// Call names a call under way: its cookie.
type Call uint64

// state of a slot, as the client sees it.
type state uint8

const (
	free      state = iota // no call is under way in it
	waiting                // its caller wants the answer
	abandoned              // its caller has given up: the answer frees the slot
)

// ring is the client's end of a mailbox: which calls are under way, and the verbs that carry them. It posts nothing.
type ring struct {
	attempt  uint64        // of every cookie
	sequence uint64        // of the latest call; rises with each, and never comes back
	cookies  [Slots]uint64 // of the call in each slot, 0: none yet
	states   [Slots]state  // of the call in each slot
	sent     [Slots]bool   // the node may have seen the call
	rung     [Slots]bool   // a thread of the node was woken for it: until that runs no look finds an answer
	length   [Slots]int    // bytes of the request in out, before the valid word
	out, in  [Slots][]byte // of SlotBytes each: requests, and answers as they were read
	asleep   []byte        // the node's word, as it was read last
	woken    uint64        // the sleep from which the node was woken last
	bell     []byte        // that sleep, as it is written
	answered []byte        // the node's word, as it was read last
	listens  []byte        // number of the client's latest sleep, as it is written
	dozes    uint64        // the same
}

// allocate cuts the ring's buffers, once for its lifetime.
func (r *ring) allocate(b rdma.Buffers) error {
	mem, err := b.Alloc(BufferBytes)
	if err != nil {
		return err
	}
	for i := range r.out {
		r.out[i], mem = mem[:SlotBytes:SlotBytes], mem[SlotBytes:]
		r.in[i], mem = mem[:SlotBytes:SlotBytes], mem[SlotBytes:]
	}
	r.asleep, r.bell, r.answered, r.listens = mem[:8:8], mem[8:16:16], mem[16:24:24], mem[24:32:32]
	return nil
}

// start begins a new mailbox.
func (r *ring) start(nonce uint64) {
	r.attempt, r.sequence, r.dozes = nonce&attemptMask, 0, 0
	r.cookies, r.states, r.sent, r.woken = [Slots]uint64{}, [Slots]state{}, [Slots]bool{}, 0
}

// put takes a free slot for a request. A slot whose call is under way is passed over, and its sequence number with it.
func (r *ring) put(procedure uint16, request []byte) (slot uint64, err error) {
	if len(request) > MaxPayload {
		return 0, fmt.Errorf("%w: request of %d bytes, at most %d", ErrTooLong, len(request), MaxPayload)
	}
	for i := uint64(1); i <= Slots; i++ {
		at := (r.sequence + i) % Slots
		if r.states[at] != free {
			continue
		}
		if r.sequence+i > sequenceMask {
			return 0, fmt.Errorf("%w: the mailbox has had all of its calls; open another one", rdma.ErrLimit)
		}
		r.sequence += i
		m := message{cookie: r.attempt<<sequenceBits | r.sequence, procedure: procedure, payload: request}
		r.length[at] = m.put(r.out[at], requestSeed)
		r.cookies[at], r.states[at], r.sent[at], r.rung[at] = m.cookie, waiting, false, false
		return at, nil
	}
	return 0, ErrBusy
}

// sendVerbs is how many verbs send appends before those that only look.
const sendVerbs = 2

// send appends the WRITEs of a request, the valid word last, and a READ of whether the node sleeps. The order of a chain
// makes the request complete when the node sees the word, and makes the READ see a node that went to sleep before.
func (r *ring) send(c *rdma.Chain, slot uint64) {
	c.Write(requestOff(slot), r.out[slot][:r.length[slot]])
	c.Write(requestOff(slot)+validOff, r.out[slot][validOff:])
	c.Read(asleepOff, r.asleep)
}

// sleeps says whether the READ of send found the node in a sleep from which it has not been woken. The caller wakes it.
func (r *ring) sleeps() bool {
	sleep := binary.LittleEndian.Uint64(r.asleep)
	if sleep == 0 || sleep == r.woken {
		return false
	}
	r.woken = sleep
	return true
}

// wakesThread says whether the sleep that sleeps has found is one of a thread, which the WRITE of ring ends.
func (r *ring) wakesThread() bool { return r.woken&inThread != 0 }

// ring appends the WRITE that ends the node's sleep. The caller wakes the thread behind it.
func (r *ring) ring(c *rdma.Chain) {
	binary.LittleEndian.PutUint64(r.bell, r.woken&^inThread)
	c.Write(BellOff, r.bell)
}

// listen appends the verbs that come before a look of a client that sleeps if it finds nothing. The WRITE comes first: the node, which stores
// an answer before it looks whether its client sleeps, sees the WRITE, or has stored the answer before the look.
func (r *ring) listen(c *rdma.Chain) {
	r.dozes++
	binary.LittleEndian.PutUint64(r.listens, r.dozes)
	c.Write(listensOff, r.listens)
	c.Read(AnsweredOff, r.answered)
}

// wakes returns what the word of the node was in that look, on which the client sleeps; not ok: the node wakes no clients.
func (r *ring) wakes() (seen uint32, ok bool) {
	n := binary.LittleEndian.Uint64(r.answered)
	return uint32(n), n != 0
}

// look appends the READs of an answer with a payload of up to n bytes: the valid word first. A READ is ordered behind the
// READ before it, so what comes second is complete if the word was there.
func (r *ring) look(c *rdma.Chain, slot uint64, n int) {
	c.Read(answerOff(slot)+validOff, r.in[slot][validOff:])
	c.Read(answerOff(slot), r.in[slot][:headBytes+min(n, MaxPayload)])
}

// found is what look has found.
type found uint8

const (
	nothing  found = iota // no answer yet
	partly                // an answer that is longer than what was read: look again for longest
	complete              // the answer
)

// answer reads what look has brought. n is how many bytes of payload that were.
func (r *ring) answer(slot uint64, n int) (f found, m message, err error) {
	in := r.in[slot]
	if binary.LittleEndian.Uint64(in[validOff:]) != r.cookies[slot] {
		return nothing, m, nil
	}
	length, err := payloadBytes(in)
	if err != nil {
		return nothing, m, err
	}
	if length > n {
		return partly, m, nil
	}
	m, err = decode(in, r.cookies[slot], answerSeed)
	return complete, m, err
}

// resumed frees the slots of abandoned calls: the node executes none of them any more.
// Preconditions: the node has resumed the mailbox for the present connection.
func (r *ring) resumed() {
	r.woken = 0 // what was to wake it may have ended with the former connection
	for i := range r.states {
		if r.states[i] == abandoned {
			r.states[i] = free
		}
	}
}
