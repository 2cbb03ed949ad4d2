package chaos

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// verdict is what the histories of one run prove.
type verdict struct {
	ops, succeeded, unknown int
	lost                    []string // acknowledged, and not to be found in the end
	illegal                 []string // objects whose history no linearizable store can have
	undecided               []string // porcupine ran out of time
}

// porcupineTimeout bounds the check of one segment. Running into it shows nothing
// and is reported as such.
const porcupineTimeout = 60 * time.Second

// The model of one object: a register that can be freed, once.
var registerModel = porcupine.Model{
	Step: func(state, input, _ any) (bool, any) {
		s, e := state.(string), input.(*event)
		const freed = "\x00freed"
		switch {
		case e.result == freedResult:
			return s == freed, s
		case s == freed:
			return false, s
		}
		switch e.kind {
		case opRead:
			return s == e.out, s
		case opWrite:
			return true, e.in
		case opUpdate:
			// One of unknown outcome does not know what it replaced.
			return e.result == unknownResult || s == e.out, e.in
		case opFree:
			return true, freed
		}
		return false, s
	},
	DescribeOperation: func(input, _ any) string {
		e := input.(*event)
		return fmt.Sprintf("%d.%d %s in=%s out=%s %s", e.worker, e.thread, e.kind, e.in, e.out, e.result)
	},
}

// judge checks the histories of all objects.
func judge(events []*event) *verdict {
	v := &verdict{}
	objects := map[string][]*event{}
	born := map[string]*event{}
	var names []string
	for _, e := range events {
		v.ops++
		switch e.result {
		case okResult, freedResult:
			v.succeeded++
		case unknownResult:
			v.unknown++
		}
		switch {
		case e.object == "":
			continue // a birth without an answer: no worker has the reference
		case e.kind == opBirth:
			if e.result == okResult {
				if born[e.object] != nil {
					v.illegal = append(v.illegal, e.object+" was born twice")
				}
				born[e.object] = e
			}
			continue
		}
		if objects[e.object] == nil {
			names = append(names, e.object)
		}
		objects[e.object] = append(objects[e.object], e)
	}
	slices.Sort(names)
	for _, name := range names {
		if strings.HasPrefix(name, countPrefix) {
			v.counter(name, objects[name])
			continue
		}
		b := born[name]
		if b == nil {
			v.illegal = append(v.illegal, name+": used, and never born")
			continue
		}
		v.object(name, b, objects[name])
	}
	return v
}

// object checks the history of one object.
func (v *verdict) object(name string, born *event, all []*event) {
	if why := lostWrite(born, all); why != "" {
		v.lost = append(v.lost, name+": "+why)
	}
	for _, e := range all {
		if e.result == badResult {
			v.illegal = append(v.illegal, fmt.Sprintf("%s: worker %d read what no worker writes: %s", name, e.worker, e.out))
			return
		}
	}
	for _, part := range segments(born.in, normalize(all), segmentLeast) {
		switch part.check() {
		case porcupine.Illegal:
			v.illegal = append(v.illegal, name+": not linearizable")
			return
		case porcupine.Unknown:
			v.undecided = append(v.undecided, fmt.Sprintf("%s: %d operations", name, len(part.ops)))
		}
	}
}

func (s *segment) check() porcupine.CheckResult {
	var ops []porcupine.Operation
	for _, e := range s.ops {
		ops = append(ops, porcupine.Operation{ClientId: 1000*e.worker + e.thread, Input: e, Call: e.call, Return: e.ret})
	}
	m := registerModel
	m.Init = func() any { return s.init }
	return porcupine.CheckOperationsTimeout(m, ops, porcupineTimeout)
}

// normalize makes a history cheaper to check without changing the verdict. It drops operations
// that were not done, and changes of unknown outcome whose effect no operation saw: a history
// that is legal with such a change is legal without it. A change of unknown outcome that was
// seen gets a return: the earliest one of the operations that saw it. Values are unique, so a
// value identifies its change.
func normalize(all []*event) []*event {
	seen := map[string]int64{} // value -> earliest return of an operation that saw it
	freed := int64(never)
	for _, e := range all {
		switch e.result {
		case okResult:
			if e.kind == opRead || e.kind == opUpdate {
				if at, ok := seen[e.out]; !ok || e.ret < at {
					seen[e.out] = e.ret
				}
			}
		case freedResult:
			freed = min(freed, e.ret)
		}
	}
	var out []*event
	for _, e := range all {
		switch e.result {
		case noResult:
			continue
		case unknownResult:
			at, ok := seen[e.in]
			if e.kind == opFree {
				at, ok = freed, freed != never
			}
			if e.kind == opRead || !ok {
				continue
			}
			c := *e
			c.ret = max(c.call, at) // it may have been done after its answer
			e = &c
		}
		out = append(out, e)
	}
	return out
}

// lostWrite compares the last read of an object with the changes that were
// acknowledged before it: "" if none is missing.
//
// The value read last was written by some change. Another change that was
// acknowledged, and was called only after that one had taken effect, came later:
// if it is not what is read, it is lost.
func lostWrite(born *event, all []*event) string {
	last := lastRead(all)
	switch {
	case last == nil:
		return "it could not be read in the end"
	case last.result == freedResult:
		if !slices.ContainsFunc(all, func(e *event) bool { return e.kind == opFree && e.result != noResult }) {
			return "it is gone, and no worker freed it"
		}
		return ""
	}
	writer, effect := written(born, all, last.out)
	if writer == nil {
		return "it has the value " + last.out + ", which no worker wrote"
	}
	for _, e := range all {
		if e != writer && e.result == okResult && e.kind != opRead && e.kind != opBirth && e.call > effect && e.ret < last.call {
			return fmt.Sprintf("%s of %q by worker %d was acknowledged and is not there; %q is", e.kind, e.in, e.worker, last.out)
		}
	}
	return ""
}

// lastRead is the read with an answer that was called last; nil if there is none.
func lastRead(all []*event) (last *event) {
	for _, e := range all {
		if e.kind == opRead && (e.result == okResult || e.result == freedResult) && (last == nil || e.call > last.call) {
			last = e
		}
	}
	return last
}

// written is the operation that wrote a value, nil if none did, and the latest time at which it
// can have taken effect: its return, or earlier that of an operation that saw the value.
func written(born *event, all []*event, value string) (writer *event, effect int64) {
	for _, e := range all {
		if (e.kind == opWrite || e.kind == opUpdate) && e.in == value {
			writer = e
		}
	}
	switch {
	case writer == nil && value == born.in:
		return born, born.ret
	case writer == nil:
		return nil, 0
	}
	if effect = writer.ret; writer.result == unknownResult {
		effect = never // unless an operation saw it
	}
	for _, e := range all {
		if e.out == value && e.result == okResult {
			effect = min(effect, e.ret)
		}
	}
	return writer, effect
}

// gaps are the longest times between from and to in which no operation, and no
// change, of some object in the list succeeded.
func gaps(events []*event, objects []string, from, to int64) (all, changes time.Duration) {
	for _, o := range objects {
		var any, change []int64
		for _, e := range events {
			if e.object != o || e.result != okResult || e.kind == opBirth {
				continue
			}
			any = append(any, e.ret)
			if e.kind != opRead {
				change = append(change, e.ret)
			}
		}
		all = max(all, longest(any, from, to))
		changes = max(changes, longest(change, from, to))
	}
	// A history may end with reads alone, and then its last gap of changes ends with the window.
	return all, max(all, changes)
}

// longest is the longest time without a success that touches from .. to.
func longest(at []int64, from, to int64) time.Duration {
	slices.Sort(at)
	last, most := from, int64(0)
	for _, t := range at {
		if t > from && last < to {
			most = max(most, t-last)
		}
		last = t
	}
	if last < to {
		most = max(most, to-last)
	}
	return time.Duration(most)
}
