package msg

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/proto"
)

// Worker is the procedure by which a worker takes the calls of functions (ObjectCall) that come to the node beside which it runs. Its requests
// begin with the operation and the number of the worker's place, which it draws: a place has one function under way.
//
//	offer  1 | place 8 | any 1 | length 1, name | ...     what the place can call; any: uploaded modules too
//	take   2 | place 8 | ms 4                             answered when there is a call, or after ms
//	give   3 | place 8 | call 8 | outcome 1, reason 1 | answer, or the text of an error
//
//	answer of take: nothing, or  call 8 | ms 4 | address 8, incarnation 8 | length 1, name | arguments
const Worker = 10

const (
	workerHead = 9
	takenHead  = 28

	// MaxFunctionNames is how many names an offer has at most.
	MaxFunctionNames = 128
	// MaxFunctionName is the longest name of a function.
	MaxFunctionName = 64
	// MaxFunctionArgs and MaxFunctionAnswer bound what a call carries.
	MaxFunctionArgs   = MaxPayload - objectHead - 1 - MaxFunctionName
	MaxFunctionAnswer = MaxPayload - objectAnswerHead
)

var _ = [1]struct{}{}[max(0, takenHead+1+MaxFunctionName+MaxFunctionArgs-MaxPayload)] // what ObjectCall carries fits

// WorkerOp is an operation of Worker.
type WorkerOp uint8

// Operations of Worker.
const (
	WorkerOffer WorkerOp = 1
	WorkerTake  WorkerOp = 2
	WorkerGive  WorkerOp = 3
)

// WorkerRequest is a request of Worker.
type WorkerRequest struct {
	Op    WorkerOp
	Place uint64

	Any   bool     // of an offer
	Names []string // of an offer

	Wait time.Duration // of a take; whole milliseconds

	Call    uint64 // of a give
	Outcome Outcome
	Reason  Reason
	Answer  []byte
}

// Append appends the encoded request.
func (r *WorkerRequest) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(append(b, byte(r.Op)), r.Place)
	switch r.Op {
	case WorkerOffer:
		b = append(b, 0)
		if r.Any {
			b[len(b)-1] = 1
		}
		for _, n := range r.Names {
			b = append(append(b, byte(len(n))), n...)
		}
	case WorkerTake:
		b = binary.LittleEndian.AppendUint32(b, uint32(r.Wait/time.Millisecond))
	case WorkerGive:
		b = binary.LittleEndian.AppendUint64(b, r.Call)
		b = append(append(b, byte(r.Outcome), byte(r.Reason)), r.Answer...)
	}
	return b
}

// NamesThatFit is how many of some names, the first ones, an offer has room for.
func NamesThatFit(names []string) int {
	left := MaxPayload - workerHead - 1
	for i, n := range names {
		if left -= 1 + len(n); left < 0 || i == MaxFunctionNames {
			return i
		}
	}
	return len(names)
}

// ParseWorker reads a request. What it refers to are parts of b.
func ParseWorker(b []byte) (r WorkerRequest, err error) {
	bad := func() (WorkerRequest, error) {
		return r, fmt.Errorf("%w: a worker's request of %d bytes", errFormat, len(b))
	}
	if len(b) < workerHead {
		return bad()
	}
	r.Op, r.Place = WorkerOp(b[0]), binary.LittleEndian.Uint64(b[1:])
	rest := b[workerHead:]
	switch {
	case r.Op == WorkerOffer && len(rest) >= 1:
		r.Any, rest = rest[0] == 1, rest[1:]
		for len(rest) > 0 {
			name, more, ok := cutName(rest)
			if !ok {
				return bad()
			}
			r.Names, rest = append(r.Names, name), more
		}
	case r.Op == WorkerTake && len(rest) == 4:
		r.Wait = time.Duration(binary.LittleEndian.Uint32(rest)) * time.Millisecond
	case r.Op == WorkerGive && len(rest) >= 10:
		r.Call, r.Outcome, r.Reason, r.Answer = binary.LittleEndian.Uint64(rest), Outcome(rest[8]), Reason(rest[9]), rest[10:]
		if r.Outcome > Unknown || r.Reason > Failed || len(r.Answer) > MaxFunctionAnswer {
			return bad()
		}
	default:
		return bad()
	}
	return r, nil
}

// cutName takes a name off b, behind its length.
func cutName(b []byte) (name string, rest []byte, ok bool) {
	if len(b) == 0 || b[0] == 0 || b[0] > MaxFunctionName || len(b) < 1+int(b[0]) {
		return "", b, false
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], true
}

// AppendFunction appends the payload of an ObjectCall.
// Preconditions: the name has 1 to MaxFunctionName bytes, the arguments at most MaxFunctionArgs.
func AppendFunction(b []byte, name string, args []byte) []byte {
	return append(append(append(b, byte(len(name))), name...), args...)
}

// ParseFunction reads the payload of an ObjectCall. args are a part of b.
func ParseFunction(b []byte) (name string, args []byte, err error) {
	name, args, ok := cutName(b)
	if !ok || len(args) > MaxFunctionArgs {
		return "", nil, fmt.Errorf("%w: the call of a function, of %d bytes", errFormat, len(b))
	}
	return name, args, nil
}

// Taken is a call that a worker has taken.
type Taken struct {
	Call     uint64        // its number, for the give
	Within   time.Duration // so long the caller still waits
	Ref      proto.Ref     // of the object
	Function string
	Args     []byte
}

// Put encodes the answer to a take into b and returns its length.
func (t *Taken) Put(b []byte) int {
	binary.LittleEndian.PutUint64(b, t.Call)
	binary.LittleEndian.PutUint32(b[8:], uint32(max(0, t.Within/time.Millisecond)))
	binary.LittleEndian.PutUint64(b[12:], uint64(t.Ref.Addr))
	binary.LittleEndian.PutUint64(b[20:], uint64(t.Ref.Incarnation))
	return len(AppendFunction(b[:takenHead], t.Function, t.Args))
}

// ParseTaken reads the answer to a take; ok is false if there is no call. The arguments are a part of b.
func ParseTaken(b []byte) (t Taken, ok bool, err error) {
	if len(b) == 0 {
		return t, false, nil
	}
	if len(b) < takenHead {
		return t, false, fmt.Errorf("%w: a call of %d bytes", errFormat, len(b))
	}
	t = Taken{
		Call: binary.LittleEndian.Uint64(b), Within: time.Duration(binary.LittleEndian.Uint32(b[8:])) * time.Millisecond,
		Ref: proto.Ref{Addr: proto.Addr(binary.LittleEndian.Uint64(b[12:])), Incarnation: proto.Incarnation(binary.LittleEndian.Uint64(b[20:]))},
	}
	t.Function, t.Args, err = ParseFunction(b[takenHead:])
	return t, err == nil, err
}
