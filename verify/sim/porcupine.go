package sim

import (
	"fmt"
	"time"

	"github.com/anishathalye/porcupine"
)

// The model of one object under one Ref is a register that can be freed once. An operation
// with an unknown outcome has no return: it may take effect at any time after its call, or
// after all other operations, which is the same as never.
var registerModel = porcupine.Model{
	Step: func(state, input, output any) (bool, any) {
		s, e := state.(uint64), input.(*event)
		const freed = ^uint64(0)
		switch {
		case e.result == freedResult:
			return s == freed, s
		case e.result == okResult:
			if s != e.out && !e.blind || s == freed {
				return false, s
			}
			switch e.kind {
			case opUpdate:
				return true, e.in
			case opFree:
				return true, freed
			}
			return true, s
		}
		switch { // unknown
		case s == freed:
		case e.kind == opUpdate:
			return true, e.in
		case e.kind == opFree:
			return true, freed
		}
		return true, s
	},
}

// porcupineTimeout is far more than a history of some dozen operations needs. A check that
// reaches it fails, because it has shown nothing.
const porcupineTimeout = 10 * time.Second

// porcupine checks the history of each object a second time, without the versions.
func (w *world) porcupine() {
	k := &w.check
	for r := range k.regs {
		var ops []porcupine.Operation
		for i := range w.hist {
			e := &w.hist[i]
			if e.reg != r || e.result == notDoneResult || e.result == pendingResult {
				continue
			}
			if e.result == unknownResult && e.kind == opRead {
				continue
			}
			ops = append(ops, porcupine.Operation{ClientId: int(e.client), Input: e, Call: e.call, Return: e.ret})
		}
		if len(ops) < 2 {
			continue
		}
		m := registerModel
		value := k.regs[r].value
		m.Init = func() any { return value }
		switch porcupine.CheckOperationsTimeout(m, ops, porcupineTimeout) {
		case porcupine.Illegal:
			w.fail("porcupine: not linearizable", k.regs[r].ref.String())
		case porcupine.Unknown:
			w.fail("porcupine: no answer", fmt.Sprintf("%v: %d operations in %v", k.regs[r].ref, len(ops), porcupineTimeout))
		}
	}
}
