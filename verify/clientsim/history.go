package clientsim

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// kind of an operation on a register: an object, or a key of a tree.
type kind uint8

const (
	opGet    kind = iota
	opPut         // sets the value, also where there is none
	opWrite       // sets the value of an object that there is
	opUpdate      // from a value to another
	opDelete      // of a key, or Free
	opAbsent      // sets the value where there is none
)

var kindNames = [...]string{"get", "put", "write", "update", "delete", "absent"}

// result of an operation.
type result uint8

const (
	done    result = iota
	none           // there is no value: no such key, or the object is freed
	exists         // PutIfAbsent found a value
	unknown        // ErrUnknown
)

var resultNames = [...]string{"ok", "none", "exists", "unknown"}

// op is one operation on one register. Values are numbers that are never used twice,
// 0 is no value.
type op struct {
	kind   kind
	result result
	in     uint64
	out    uint64
	who    string
	call   int64
	ret    int64
	at     time.Duration
}

func (o op) String() string {
	return fmt.Sprintf("%v %s %s in %d out %d %s [%d,%d]", o.at.Round(time.Microsecond), o.who, kindNames[o.kind], o.in, o.out, resultNames[o.result], o.call, o.ret)
}

// history is what clients did and heard.
type history struct {
	mu   sync.Mutex
	tick int64
	last uint64 // value
	regs map[string][]op
}

func newHistory() *history { return &history{regs: map[string][]op{}} }

func (h *history) now() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tick++
	return h.tick
}

// value is a number never used before.
func (h *history) value() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last++
	return h.last
}

// add notes an operation that has ended. Reads of unknown result say nothing.
func (h *history) add(reg string, o op) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if o.ret == 0 {
		h.tick++
		o.ret = h.tick
	}
	if o.result == unknown {
		if o.kind == opGet {
			return
		}
		o.ret = math.MaxInt64 // it may take effect at any time, or never
	}
	h.regs[reg] = append(h.regs[reg], o)
}

// model is a register.
var model = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, _ any) (bool, any) {
		s, o := state.(uint64), input.(op)
		switch o.result {
		case none:
			return s == 0, s
		case exists:
			return s != 0, s
		}
		sure := o.result == done
		switch o.kind {
		case opGet:
			return s == o.out, s
		case opPut:
			return true, o.in
		case opWrite:
			if s == 0 {
				return !sure, s
			}
			return true, o.in
		case opUpdate:
			if s == 0 || sure && s != o.out {
				return !sure, s
			}
			return true, o.in
		case opDelete:
			return !sure || s != 0, uint64(0)
		case opAbsent:
			if s != 0 {
				return !sure, s
			}
			return true, o.in
		}
		return false, s
	},
}

const porcupineTimeout = 20 * time.Second

// check says which registers' histories are not linearizable.
func (h *history) check() (problems []string) {
	var names []string
	for name := range h.regs {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		ops := make([]porcupine.Operation, 0, len(h.regs[name]))
		for i, o := range h.regs[name] {
			ops = append(ops, porcupine.Operation{ClientId: i, Input: o, Call: o.call, Return: o.ret})
		}
		switch porcupine.CheckOperationsTimeout(model, ops, porcupineTimeout) {
		case porcupine.Illegal:
			list := slices.Clone(h.regs[name])
			slices.SortFunc(list, func(a, b op) int { return int(a.call - b.call) })
			s := name + " is not linearizable:"
			for _, o := range list[max(0, len(list)-40):] {
				s += "\n    " + o.String()
			}
			problems = append(problems, s)
		case porcupine.Unknown:
			problems = append(problems, fmt.Sprintf("%s: no answer from porcupine in %v", name, porcupineTimeout))
		}
	}
	return problems
}
