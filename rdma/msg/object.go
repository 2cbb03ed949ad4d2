package msg

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/proto"
)

// Object is the procedure by which a node reads, writes or frees an object in its primary's memory, with the programs and under
// the session of its own. A request:
//
//	 0 operation  1 byte
//	 1 flags      1 byte: 1 turn
//	 4 ms         4 bytes; the node gives up, with nothing done, when it has not begun by then
//	 8 address    8 bytes  of the reference
//	16 incarnation 8 bytes of the reference
//	24 epoch      8 bytes  of the region: the node executes under this one or not at all
//	32 version    8 bytes  that the object must have; 0: any
//	40 turn       8 bytes  that an earlier answer has given; 0: none
//	48 payload             of a write
//
// An answer:
//
//	 0 outcome    1 byte: 0 done, 1 not done, 2 unknown
//	 1 reason     1 byte, of what is not done
//	 2 flags      1 byte: 1 the payload is the object's; 2 other sessions have sent requests for the object lately
//	 4 tag        4 bytes  of the object
//	 8 version    8 bytes  of the object: behind a write the new one, of a conflict the present one
//	16 turn       8 bytes  for the next request; 0: none
//	24 payload             of the object; or the text of a reason
//
// # Turns
//
// A request with the flag turn that reads the object, or meets a conflict, gets the next turn at the object: other requests at
// that node wait for keepTurn, or until a request names the turn. So of many writers that read, compute and compare each gets one
// conflict at most. A turn excludes no writer: the compare decides.
const Object = 3

// ObjectOp is an operation of Object.
type ObjectOp uint8

// Operations of Object.
const (
	ObjectRead  ObjectOp = 1
	ObjectWrite ObjectOp = 2
	ObjectFree  ObjectOp = 3
	// ObjectRelease takes the object's reservation from a session that is fenced, settles what that session has left of its
	// change, and releases the object ([0227]). It waits for one that holds the object and lives, as long as the request says.
	ObjectRelease ObjectOp = 4
	// ObjectCall has a worker beside the node call a function on the object; see Worker. The payload is the function's name, behind its
	// length in a byte, and the arguments. That of the answer is the function's, or the text of its error.
	ObjectCall ObjectOp = 5
)

const (
	objectHead       = 48
	objectAnswerHead = 24

	objectTurn    = 1 // flag of a request
	objectPayload = 1 // flags of an answer
	objectOthers  = 2

	// MaxObjectPayload is the longest payload that a node writes. It reads a little longer ones.
	MaxObjectPayload = MaxPayload - objectHead
)

// Outcome is what has become of a request.
type Outcome uint8

// Outcomes. NotDone: and it never will be. Unknown: done once, or not at all.
const (
	Done    Outcome = 0
	NotDone Outcome = 1
	Unknown Outcome = 2
)

// Reason says why a request was not done.
type Reason uint8

// Reasons. Part of the format.
const (
	NoReason   Reason = 0
	Conflict   Reason = 1  // the object is at another version
	Freed      Reason = 2  // the object is not there any more
	BadRef     Reason = 3  // the reference names no object
	Immutable  Reason = 4  // the object is write-once
	TooLarge   Reason = 5  // for the object's slab, or for an answer
	Busy       Reason = 6  // others hold or wait for the object, or the node has too much to do
	Damaged    Reason = 7  // no replica has a whole image
	Elsewhere  Reason = 8  // the node does not execute for this region under this epoch; or not yet
	Encrypted  Reason = 9  // the node has no key
	Indirect   Reason = 10 // the object lies in several slabs
	OtherCause Reason = 11 // the text says it
	NoFunction Reason = 12 // no worker beside the node has the function
	Failed     Reason = 13 // the function has returned an error, or has taken too long
)

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason_%d", r)
}

var reasonNames = [...]string{
	NoReason: "none", Conflict: "conflict", Freed: "freed", BadRef: "bad_ref", Immutable: "immutable", TooLarge: "too_large", Busy: "busy", Damaged: "damaged",
	Elsewhere: "elsewhere", Encrypted: "encrypted", Indirect: "indirect", OtherCause: "other", NoFunction: "no_function", Failed: "failed",
}

// ObjectRequest is a request of Object.
type ObjectRequest struct {
	Op      ObjectOp
	Turn    bool          // give the next turn
	Wait    time.Duration // see ms; whole milliseconds
	Ref     proto.Ref
	Epoch   uint64
	Version uint64
	Named   uint64 // turn of an earlier answer
	Payload []byte // at most MaxObjectPayload bytes
}

// Append appends the encoded request.
func (r *ObjectRequest) Append(b []byte) []byte {
	flags := byte(0)
	if r.Turn {
		flags = objectTurn
	}
	b = append(b, byte(r.Op), flags, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(r.Wait/time.Millisecond))
	for _, word := range [...]uint64{uint64(r.Ref.Addr), uint64(r.Ref.Incarnation), r.Epoch, r.Version, r.Named} {
		b = binary.LittleEndian.AppendUint64(b, word)
	}
	return append(b, r.Payload...)
}

// ParseObject reads a request. Its payload is a part of b.
func ParseObject(b []byte) (r ObjectRequest, err error) {
	if len(b) < objectHead {
		return r, fmt.Errorf("%w: a request for an object of %d bytes, want at least %d", errFormat, len(b), objectHead)
	}
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	r = ObjectRequest{
		Op: ObjectOp(b[0]), Turn: b[1]&objectTurn != 0, Wait: time.Duration(binary.LittleEndian.Uint32(b[4:])) * time.Millisecond,
		Ref: proto.Ref{Addr: proto.Addr(word(8)), Incarnation: proto.Incarnation(word(16))}, Epoch: word(24), Version: word(32), Named: word(40), Payload: b[objectHead:],
	}
	switch {
	case r.Op < ObjectRead || r.Op > ObjectCall:
		err = fmt.Errorf("%w: operation %d of an object", errFormat, r.Op)
	case r.Op != ObjectWrite && r.Op != ObjectCall && len(r.Payload) > 0:
		err = fmt.Errorf("%w: operation %d of an object with a payload", errFormat, r.Op)
	case b[1]&^objectTurn != 0 || b[2] != 0 || b[3] != 0:
		err = fmt.Errorf("%w: flags of a request for an object", errFormat)
	}
	return r, err
}

// ObjectAnswer is an answer of Object.
type ObjectAnswer struct {
	Outcome Outcome
	Reason  Reason
	Has     bool // Payload is the object's
	Others  bool // other sessions have sent requests for the object lately
	Tag     uint32
	Version uint64
	Turn    uint64
	Payload []byte // of the object; else the text of a reason
}

// Room is what is left of an answer's buffer for the payload of an object.
func Room(answer []byte) []byte { return answer[objectAnswerHead:objectAnswerHead:len(answer)] }

// Put encodes the answer into b and returns its length. A payload in Room(b) is not moved. The text of a reason is cut to fit.
func (a *ObjectAnswer) Put(b []byte) int {
	flags := byte(0)
	if a.Has {
		flags = objectPayload
	}
	if a.Others {
		flags |= objectOthers
	}
	b[0], b[1], b[2], b[3] = byte(a.Outcome), byte(a.Reason), flags, 0
	binary.LittleEndian.PutUint32(b[4:], a.Tag)
	binary.LittleEndian.PutUint64(b[8:], a.Version)
	binary.LittleEndian.PutUint64(b[16:], a.Turn)
	return objectAnswerHead + copy(b[objectAnswerHead:], a.Payload)
}

// ParseObjectAnswer reads an answer. Its payload is a part of b.
func ParseObjectAnswer(b []byte) (a ObjectAnswer, err error) {
	if len(b) < objectAnswerHead {
		return a, fmt.Errorf("%w: an answer for an object of %d bytes, want at least %d", errFormat, len(b), objectAnswerHead)
	}
	a = ObjectAnswer{
		Outcome: Outcome(b[0]), Reason: Reason(b[1]), Has: b[2]&objectPayload != 0, Others: b[2]&objectOthers != 0, Tag: binary.LittleEndian.Uint32(b[4:]),
		Version: binary.LittleEndian.Uint64(b[8:]), Turn: binary.LittleEndian.Uint64(b[16:]), Payload: b[objectAnswerHead:],
	}
	if a.Outcome > Unknown {
		err = fmt.Errorf("%w: outcome %d of a request for an object", errFormat, a.Outcome)
	}
	return a, err
}
