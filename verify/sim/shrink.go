package sim

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
)

// EncodeChoices encodes a list of choices for a command line. Most of a shrunk list are runs of
// zeros.
func EncodeChoices(c []uint16) string {
	var b []byte
	for i := 0; i < len(c); {
		if c[i] != 0 {
			b = binary.AppendUvarint(b, uint64(c[i])<<1|1)
			i++
			continue
		}
		n := i
		for n < len(c) && c[n] == 0 {
			n++
		}
		b = binary.AppendUvarint(b, uint64(n-i)<<1)
		i = n
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// maxChoices bounds the list that DecodeChoices returns.
const maxChoices = 1 << 22

// DecodeChoices is the inverse of EncodeChoices.
func DecodeChoices(s string) ([]uint16, error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return nil, err
	}
	c := []uint16{}
	for len(b) > 0 {
		x, n := binary.Uvarint(b)
		if n <= 0 || x>>17 != 0 && x&1 == 1 || x>>1 > maxChoices || len(c)+int(x>>1) > maxChoices {
			return nil, errors.New("not a list of choices")
		}
		b = b[n:]
		if x&1 == 1 {
			c = append(c, uint16(x>>1))
		} else {
			c = append(c, make([]uint16, x>>1)...)
		}
	}
	return c, nil
}

// Shrink looks for a smaller schedule that violates the same check: one with fewer choices and
// more zeros, which means fewer moves, operations, faults and switches between clients. It
// runs at most tries schedules.
func (r *Runner) Shrink(f *Failure, tries int) *Failure {
	w := r.w
	o := f.Options
	play := func(c []uint16) bool {
		tries--
		o.Choices = c
		w.log, w.ch.record = nil, false
		w.reset(o, o.Seed)
		w.run()
		return w.failed != nil && w.failed.What == f.What
	}
	// The list of the original.
	w.log, w.ch.record = nil, true
	w.reset(o, o.Seed)
	w.run()
	best := append([]uint16{}, w.ch.taken...)
	w.ch.record = false
	if !play(best) {
		return f
	}
	for lo, hi := 0, len(best); lo < hi && tries > 0; {
		mid := (lo + hi) / 2
		if play(best[:mid]) {
			hi = mid
			best = best[:mid]
		} else {
			lo = mid + 1
		}
	}
	try := make([]uint16, 0, len(best))
	for size := 256; size > 0 && tries > 0; size /= 2 {
		for at := 0; at < len(best) && tries > 0; at += size {
			end := min(at+size, len(best))
			zero := true
			for _, x := range best[at:end] {
				zero = zero && x == 0
			}
			if !zero {
				try = append(try[:0], best...)
				clear(try[at:end])
				if play(try) {
					best = append(best[:0], try...)
					continue
				}
			}
			// Leave the piece out.
			try = append(append(try[:0], best[:at]...), best[end:]...)
			if tries > 0 && play(try) {
				best = append(best[:0], try...)
				at -= size
			}
		}
	}
	for n := len(best); n > 0 && best[n-1] == 0; n-- {
		best = best[:n-1]
	}
	o.Choices = best
	w.reset(o, o.Seed)
	w.run()
	if w.failed == nil {
		return f
	}
	g := r.explain(o, o.Seed)
	g.Options.Choices = best
	return g
}
