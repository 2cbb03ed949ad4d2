package chaos

import (
	"cmp"
	"slices"
)

// segmentLeast is how many operations a segment has at least: porcupine keeps a set of
// operations for each step that it tries, so that its memory grows with the square.
const segmentLeast = 2000

// segment is a part of an object's history that can be checked by itself.
type segment struct {
	init string // the value it begins with
	ops  []*event
}

// segments cuts the history of an object where an operation met no other one and says
// what the value is: all others took effect either before it or after it. The whole
// is linearizable if and only if each segment is.
func segments(init string, ops []*event, least int) []segment {
	ops = slices.Clone(ops)
	slices.SortStableFunc(ops, func(a, b *event) int { return cmp.Compare(a.call, b.call) })
	var out []segment
	first, latest := 0, int64(-1) // latest return of all before
	for i, e := range ops {
		alone := latest < e.call && (i+1 == len(ops) || e.ret < ops[i+1].call)
		latest = max(latest, e.ret)
		value, known := valueAfter(e)
		if !alone || !known || i+1-first < least {
			continue
		}
		out = append(out, segment{init, ops[first : i+1]})
		init, first = value, i+1
	}
	if first < len(ops) {
		out = append(out, segment{init, ops[first:]})
	}
	return out
}

// valueAfter is what the object has right after an operation that met no other one.
func valueAfter(e *event) (value string, known bool) {
	switch {
	case e.result != okResult:
		return "", false
	case e.kind == opRead:
		return e.out, true
	case e.kind == opWrite, e.kind == opUpdate:
		return e.in, true
	}
	return "", false
}
