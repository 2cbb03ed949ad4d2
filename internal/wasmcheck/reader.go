package wasmcheck

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A reader goes through the bytes of a module. The first error stays; what is read after it is 0.
type reader struct {
	b   []byte
	at  int
	err error
}

var errShort = errors.New("ends too early")

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d: %w", r.at, fmt.Errorf(format, args...))
	}
	r.at = len(r.b)
}

func (r *reader) more() bool { return r.err == nil && r.at < len(r.b) }

func (r *reader) byte() byte {
	if !r.more() {
		r.fail("%w", errShort)
		return 0
	}
	r.at++
	return r.b[r.at-1]
}

// bytes are the next n.
func (r *reader) bytes(n int) []byte {
	if r.err != nil || n < 0 || n > len(r.b)-r.at {
		r.fail("%w", errShort)
		return nil
	}
	r.at += n
	return r.b[r.at-n : r.at]
}

// u32 is an unsigned number of at most 32 bits in LEB128.
func (r *reader) u32() uint32 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.b[r.at:min(len(r.b), r.at+5)])
	if n <= 0 || v > 1<<32-1 {
		r.fail("is no number of 32 bits")
		return 0
	}
	r.at += n
	return uint32(v)
}

// count is the length of a list, each entry of which takes at least one byte. What reads the list later may
// allocate that many entries first.
func (r *reader) count() uint32 {
	n := r.u32()
	if r.err == nil && int64(n) > int64(len(r.b)-r.at) {
		r.fail("a list of %d entries: %w", n, errShort)
		return 0
	}
	return n
}

// name passes a name, or other bytes with their number before them.
func (r *reader) name() []byte { return r.bytes(int(r.u32())) }

// signed is a signed number of at most so many bytes in LEB128.
func (r *reader) signed(most int) (v int64) {
	for i := range most {
		b := r.byte()
		v |= int64(b&0x7f) << (7 * i)
		if b >= 0x80 {
			continue
		}
		if end := 7 * (i + 1); b&0x40 != 0 && end < 64 {
			v |= -1 << end
		}
		return v
	}
	r.fail("is a number of more than %d bytes", most)
	return 0
}

// isValueType says whether a byte is the type of a value. The runtime reads types of later versions too, also those that
// take more than one byte.
func isValueType(b byte) bool { return b >= 0x7b && b <= valueI32 || b == funcref || b == external }

// valueType passes the type of a value.
func (r *reader) valueType() {
	if b := r.byte(); r.err == nil && !isValueType(b) {
		r.fail("type %#x is not one of WebAssembly 2.0", b)
	}
}

// referenceType is the type of a reference: what a table has, and what is null.
func (r *reader) referenceType() byte {
	b := r.byte()
	if r.err == nil && b != funcref && b != external {
		r.fail("type %#x is not that of a reference in WebAssembly 2.0", b)
	}
	return b
}

// globalType passes the type of a global, and whether it can be changed.
func (r *reader) globalType() {
	r.valueType()
	if b := r.byte(); r.err == nil && b > 1 {
		r.fail("global with flag %#x", b)
	}
}

// part is a reader of the next n bytes alone.
func (r *reader) part(n uint32) *reader {
	if r.err == nil && int64(n) > int64(len(r.b)-r.at) {
		r.fail("%w", errShort)
	}
	if r.err != nil {
		return &reader{err: r.err}
	}
	r.at += int(n)
	return &reader{b: r.b[:r.at], at: r.at - int(n)}
}

// ends takes over the error of a part, which must have been read to its end.
func (r *reader) ends(part *reader) {
	if part.err == nil && part.at < len(part.b) {
		part.fail("is behind the end")
	}
	if r.err == nil && part.err != nil {
		r.err = part.err
		r.at = len(r.b)
	}
}

func appendU32(b []byte, v uint32) []byte { return binary.AppendUvarint(b, uint64(v)) }

// appendSized appends bytes with their length before them.
func appendSized(b, content []byte) []byte {
	return append(appendU32(b, uint32(len(content))), content...)
}
