package msg

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Layout of a mailbox. Part of the format: see doc.go.
const (
	// Slots is the length of each ring, and how many calls of a lane can be under way.
	Slots = 16
	// SlotBytes is the size of a slot.
	SlotBytes = 4096
	// MaxPayload is the longest request or answer. What is longer stays in a slab, and the request names it.
	MaxPayload = validOff - headBytes
	// MailboxBytes is the size of a mailbox: a page of words, the ring of requests, the ring of answers.
	MailboxBytes = answersOff + Slots*SlotBytes

	// BellOff is a word of the client: the sleep that it has ended last of those in a thread of the node.
	BellOff = 128
	// AnsweredOff is a word of the node: it rises with each answer where the node wakes clients that sleep, and is 0 elsewhere.
	AnsweredOff = 192

	asleepOff   = 64  // word of the node: number of the sleep while the node sleeps and has to be woken, else 0
	listensOff  = 256 // word of the client: number of the latest time that it was about to sleep until an answer comes
	requestsOff = 4096
	answersOff  = requestsOff + Slots*SlotBytes

	headBytes = 24
	validOff  = SlotBytes - 8
)

// A cookie names a call: attempt:24 | sequence:40. The attempt is of the mailbox, so that no answer to an earlier one
// matches; the sequence rises by one or more with each call, and its remainder by Slots is the slot.
const (
	sequenceBits = 40
	sequenceMask = 1<<sequenceBits - 1
	attemptMask  = 1<<(64-sequenceBits) - 1
)

// inThread is the bit of a sleep's number that says that a thread of the node sleeps on the client's bell word. The client then stores
// the number there, and wakes the thread. Without the bit the node waits for what its provider has for that.
const inThread = 1 << 63

// Seeds of the checksums: a request is never taken for an answer.
const (
	requestSeed = 0x51_7265_7175_6573
	answerSeed  = 0x51_616e_7377_6572
)

// Status of an answer.
const (
	statusDone    = 0 // the payload is what the procedure returned
	statusUnknown = 1 // the node has no such procedure: nothing ran
	statusRefused = 2 // the procedure returned an error, whose text is the payload
)

var errFormat = errors.New("malformed message")

// message is a slot without its valid word.
type message struct {
	cookie    uint64 // also the slot's valid word when the message is complete
	procedure uint16 // of the call; comes back in the answer
	status    uint16 // of an answer; 0 in a request
	payload   []byte // at most MaxPayload bytes
}

// put encodes a message into a slot's buffer, with the valid word, and returns how many bytes stand before that.
// Preconditions: len(slot) is SlotBytes, the payload is at most MaxPayload bytes.
func (m *message) put(slot []byte, seed uint64) (body int) {
	body = headBytes + len(m.payload)
	copy(slot[headBytes:], m.payload)
	binary.LittleEndian.PutUint64(slot[8:], m.cookie)
	binary.LittleEndian.PutUint16(slot[16:], m.procedure)
	binary.LittleEndian.PutUint16(slot[18:], m.status)
	binary.LittleEndian.PutUint32(slot[20:], uint32(len(m.payload)))
	binary.LittleEndian.PutUint64(slot[0:], xxh3.HashSeed(slot[8:body], seed))
	binary.LittleEndian.PutUint64(slot[validOff:], m.cookie)
	return body
}

// payloadBytes is the length that a message's head claims; an error if no message is so long.
func payloadBytes(head []byte) (int, error) {
	n := binary.LittleEndian.Uint32(head[20:])
	if n > MaxPayload {
		return 0, fmt.Errorf("%w: payload of %d bytes, at most %d are allowed", errFormat, n, MaxPayload)
	}
	return int(n), nil
}

// decode reads the message that a valid word has announced. The payload is a part of b.
// Preconditions: b holds the head and the whole payload.
func decode(b []byte, cookie, seed uint64) (m message, err error) {
	n, err := payloadBytes(b)
	if err != nil {
		return m, err
	}
	m = message{
		cookie: binary.LittleEndian.Uint64(b[8:]), procedure: binary.LittleEndian.Uint16(b[16:]),
		status: binary.LittleEndian.Uint16(b[18:]), payload: b[headBytes : headBytes+n],
	}
	switch {
	case m.cookie != cookie:
		return m, fmt.Errorf("%w: cookie %#x under the valid word %#x", errFormat, m.cookie, cookie)
	case binary.LittleEndian.Uint64(b) != xxh3.HashSeed(b[8:headBytes+n], seed):
		return m, fmt.Errorf("%w: checksum of cookie %#x", errFormat, cookie)
	}
	return m, nil
}

// slotOf is the slot of a cookie.
func slotOf(cookie uint64) uint64 { return cookie & sequenceMask % Slots }

func requestOff(slot uint64) uint64 { return requestsOff + slot*SlotBytes }
func answerOff(slot uint64) uint64  { return answersOff + slot*SlotBytes }
