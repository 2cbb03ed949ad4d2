package redismodel

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// Each command of the model is one atom, or several in order,
// each at an instant between its call and its answer:
//
//   - a command on a string or on whole keys, RENAME and RENAMENX too: one;
//   - a command on a field or member: the key is looked up, and the field is read or
//     changed in the hash that the key had, which a RENAME may have given another key;
//   - COPY: the source is looked up, each field is read, and the destination is written.
//
// An empty hash may be seen as absent or as there. A command that was not done may leave one
// where it found no key. One exception is allowed only where
// nothing else explains a history, and counted: a write to a field of a hash that is removed
// meanwhile may be seen before the removal and take effect behind it.

const (
	maxOps = 40 // commands at once
	// maxStates bounds the memory of a check: a state has half a KiB.
	maxStates = 2 << 20
)

// Never is the return of a command without an answer.
const Never = math.MaxInt64

// Event is a command as its client has seen it, on the keys a, b and c and the fields f
// and g. Call and Ret are of one clock.
type Event struct {
	Actor     int
	Args      []string
	Reply     string
	Call, Ret int64
	Unknown   bool // no answer, or the one that says so
}

func (e *Event) String() string {
	ret := strconv.FormatInt(e.Ret, 10)
	if e.Ret == Never {
		ret = "never"
	}
	return fmt.Sprintf("%4d..%-5s actor %d: %.80s -> %.80s", e.Call, ret, e.Actor, strings.Join(e.Args, " "), strings.TrimSpace(strings.ReplaceAll(e.Reply, "\r\n", " ")))
}

func keyIndex(k string) int   { return strings.Index("abc", k) }
func fieldIndex(f string) int { return strings.Index("fg", f) }

// atomsOf is how many instants a command has.
func atomsOf(e *Event) int {
	switch e.Args[0] {
	case "HSET", "HSETNX", "HINCRBY", "HGET", "HDEL", "ZADD", "ZREM", "ZSCORE":
		return 2
	case "COPY":
		return 4
	}
	return 1
}

func kindOf(name string) byte {
	if name[0] == 'Z' {
		return kindZset
	}
	return kindHash
}

// Check compares the answers of commands with the model: "" if some order explains them.
// exception says that it took the exception. The result does not depend on the order of the list.
func Check(events []*Event, timeout time.Duration) (bad string, exception bool) {
	if bad = check(events, timeout, maxStates, false); bad != "" {
		bad, exception = check(events, timeout, maxStates, true), true
	}
	return bad, exception
}

// What Check says when nothing has been shown; see Inconclusive.
const (
	ErrUndecided = "the model has not come to an end in its time"
	ErrCrowded   = "too many commands were under way at once for the model"
	ErrTooLarge  = "the history has too many explanations for the model"
)

// Inconclusive says whether the answer of Check shows nothing.
func Inconclusive(bad string) bool {
	return bad == ErrUndecided || bad == ErrCrowded || bad == ErrTooLarge
}

func check(events []*Event, timeout time.Duration, limit int, exception bool) string {
	var ops []porcupine.Operation
	events = slices.Clone(events)
	slices.SortStableFunc(events, func(a, b *Event) int { return cmp.Compare(a.Call, b.Call) })
	var free [maxOps]int64 // when the command there has ended
	for n, e := range events {
		switch e.Args[0] {
		case "HLEN", "ZCARD", "ZRANGE":
			continue // no snapshots
		}
		if notDone(e) && !creates(e) || e.Unknown && readOnly[e.Args[0]] {
			continue
		}
		op := slices.IndexFunc(free[:], func(end int64) bool { return end < e.Call })
		if op < 0 {
			return ErrCrowded
		}
		if notDone(e) { // others may meet what it has begun at any time
			free[op] = Never
			ops = append(ops, porcupine.Operation{ClientId: n, Input: &atom{e: e, op: int8(op), last: true, left: true}, Call: e.Call, Return: Never})
			continue
		}
		free[op] = e.Ret
		k := atomsOf(e)
		again := exception && (e.Args[0] == "ZADD" || strings.HasPrefix(e.Args[0], "HS") || e.Args[0] == "HINCRBY")
		if again {
			k += 2
		}
		for i := range k {
			ops = append(ops, porcupine.Operation{ClientId: n, Input: &atom{e: e, op: int8(op), step: int8(i), last: i == k-1, again: again}, Call: e.Call, Return: e.Ret})
		}
	}
	c := &checker{texts: newTexts(), limit: limit}
	m := porcupine.NondeterministicModel{
		Init:              func() []any { return []any{state{}} },
		Step:              func(from, input, _ any) []any { return c.step(from.(state), input.(*atom)) },
		DescribeOperation: func(input, _ any) string { a := input.(*atom); return fmt.Sprint(a.step, " ", a.e) },
	}
	result := porcupine.CheckOperationsTimeout(m.ToModel(), ops, timeout)
	switch {
	case result == porcupine.Ok:
		return ""
	case result == porcupine.Unknown:
		return ErrUndecided
	case c.tooLarge:
		return ErrTooLarge
	}
	return "no order of the commands explains the answers"
}

// notDone says whether the answer is that nothing was done, and that for no reason of the
// command's own.
func notDone(e *Event) bool {
	return strings.HasPrefix(e.Reply, "-") && strings.HasSuffix(e.Reply, "; not done\r\n")
}

// creates says whether the command makes a hash or sorted set where there is none.
func creates(e *Event) bool {
	switch e.Args[0] {
	case "HSET", "HSETNX", "HINCRBY":
		return true
	case "ZADD":
		return e.Args[2] != "XX"
	}
	return false
}

var readOnly = map[string]bool{"GET": true, "HGET": true, "ZSCORE": true, "TYPE": true}

// History is what a failure shows.
func History(events []*Event) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintln(&b, e)
	}
	return b.String()
}
