package beamio

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// span is the restriction of a read: keys that one call of ProcessElement reads.
type span struct {
	From, To []byte // From <= key < To; an empty To is no bound
	None     bool   // no key: all of it was split off
	Bytes    int64  // estimate
}

// tracker is the sdf.RTracker of a span. Positions are keys, []byte, in order; nil is the end of the span.
type tracker struct {
	rest span
	last []byte // claimed last, if any is
	any  bool
	done bool
	err  error
}

// newTracker begins at the start of a span.
func newTracker(s span) *tracker { return &tracker{rest: s, done: s.None} }

// TryClaim claims a key, or with nil the rest of the span, which has no more keys.
func (t *tracker) TryClaim(pos any) bool {
	key, ok := pos.([]byte)
	switch {
	case t.done:
		return false
	case !ok:
		t.err = fmt.Errorf("quarry: position %v is no key", pos)
		return false
	case key == nil:
		t.done = true
		return false
	case bytes.Compare(key, t.rest.From) < 0 || t.any && bytes.Compare(key, t.last) <= 0:
		t.err = fmt.Errorf("quarry: key %q is claimed out of order", key)
		return false
	case len(t.rest.To) > 0 && bytes.Compare(key, t.rest.To) >= 0:
		t.done = true
		return false
	}
	t.last, t.any = append(t.last[:0], key...), true
	return true
}

// GetError is why claims fail.
func (t *tracker) GetError() error { return t.err }

// next is the first key that is not claimed.
func (t *tracker) next() []byte {
	if !t.any {
		return t.rest.From
	}
	return append(bytes.Clone(t.last), 0)
}

// TrySplit splits the keys that are not claimed at about a fraction of them, with 0 before the first.
func (t *tracker) TrySplit(fraction float64) (primary, residual any, err error) {
	if t.done || t.err != nil {
		return t.rest, nil, nil
	}
	at, rest := t.next(), t.rest
	share := 1 - position(t.rest, at)
	if fraction <= 0 {
		if t.done = true; t.any {
			t.rest.To = at
		} else {
			t.rest.None = true
		}
	} else {
		if at = between(at, t.rest.To, fraction); at == nil {
			return t.rest, nil, nil
		}
		t.rest.To, share = at, share*(1-fraction)
	}
	rest.From, rest.Bytes = at, int64(share*float64(rest.Bytes))
	t.rest.Bytes -= rest.Bytes
	return t.rest, rest, nil
}

// GetProgress is in estimated bytes.
func (t *tracker) GetProgress() (done, remaining float64) {
	size := float64(max(1, t.rest.Bytes))
	if t.done {
		return size, 0
	}
	p := position(t.rest, t.next())
	return p * size, (1 - p) * size
}

// IsDone says whether nothing is left to be claimed.
func (t *tracker) IsDone() bool { return t.err == nil && t.done }

// GetRestriction is the span as splits have left it.
func (t *tracker) GetRestriction() any { return t.rest }

// IsBounded says that a span ends.
func (t *tracker) IsBounded() bool { return true }

// Keys are compared by the 8 bytes behind what the bounds of their span begin with alike, as numbers.
const digits = 8

// alike is how many bytes two bounds begin with alike; an empty high bound is none.
func alike(low, high []byte) (n int) {
	for n < len(low) && n < len(high) && low[n] == high[n] {
		n++
	}
	return n
}

// number is what a key is compared by.
func number(key []byte, skip int) uint64 {
	var b [digits]byte
	if len(key) > skip {
		copy(b[:], key[skip:])
	}
	return binary.BigEndian.Uint64(b[:])
}

// bounds are the numbers of a span's bounds.
func bounds(low, high []byte) (skip int, from, to uint64) {
	skip = alike(low, high)
	from, to = number(low, skip), ^uint64(0)
	if len(high) > 0 {
		to = number(high, skip)
	}
	return skip, from, to
}

// position is how far a key is in a span, 0 to 1, as if keys were spread evenly.
func position(s span, key []byte) float64 {
	skip, from, to := bounds(s.From, s.To)
	if at := number(key, skip); to > from && at > from {
		return min(1, float64(at-from)/float64(to-from))
	}
	return 0
}

// between is a key about a fraction of the way between two, and neither of them; nil: there is none.
func between(low, high []byte, fraction float64) []byte {
	skip, from, to := bounds(low, high)
	if to <= from || fraction >= 1 {
		return nil
	}
	at := from + uint64(fraction*float64(to-from))
	key := binary.BigEndian.AppendUint64(bytes.Clone(low[:skip]), at)
	if bytes.Compare(key, low) <= 0 || len(high) > 0 && bytes.Compare(key, high) >= 0 {
		return nil
	}
	return key
}
