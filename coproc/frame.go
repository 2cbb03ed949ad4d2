package coproc

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A plugin that runs outside of its worker talks to it over two byte streams, in
// frames:
//
//	kind:1 | bytes of a:4 | bytes of b:4 | a | b       little endian
//
// One side sends at a time: the guest asks for input by reading, and a call is
// answered by the next FrameAnswer that the guest reads. Records that it had
// already read from the stream by then come before the answer.
const (
	// From the worker.
	FrameStart  = 'S' // a: Start as JSON
	FrameRecord = 'R' // a: key, b: value
	FrameGroup  = 'G' // a: key; its values follow
	FrameValue  = 'V' // b: value
	FrameEnd    = 'E'
	FrameAnswer = 'A' // a: result, b: error text, "" for none

	// From the guest.
	FrameAbout    = 'D' // a: About as JSON
	FrameEmit     = 'e' // a: key, b: value
	FrameLog      = 'l' // a: line
	FrameProgress = 'p' // a: done:8 of:8
	FrameCall     = 'c' // a: EnvCall as JSON, b: payload
	FrameDone     = 'd' // b: error text, "" for none

	frameHeadBytes = 9
	// MaxFrameBytes bounds a and b together: an object and the rest of its record.
	MaxFrameBytes = 65 << 20
)

// Start tells a guest what to do.
type Start struct {
	// Describe: say FrameAbout and end.
	Describe bool              `json:"describe,omitempty"`
	Part     Part              `json:"part"`           // what to work on
	Args     map[string]string `json:"args,omitempty"` // the job's arguments
	// MicrosLeft until the deadline.
	MicrosLeft int64 `json:"micros_left"`
}

// EnvCall is a request of a guest to its Env; Op is the method's name in lower case,
// with "tree" before those of Tree.
type EnvCall struct {
	Op    string `json:"op"`
	Ref   string `json:"ref,omitempty"`   // of an object, as proto.Ref prints it
	Name  string `json:"name,omitempty"`  // of a tree, or of an entry of the placement library
	Key   []byte `json:"key,omitempty"`   // of a tree's entry; of a scan: where it begins
	To    []byte `json:"to,omitempty"`    // of a scan: the end of the range, excluded
	Limit int    `json:"limit,omitempty"` // of a scan: the most entries; 0: no limit
}

// ErrFrame: the bytes are no frame.
var ErrFrame = errors.New("malformed frame")

// AppendFrame appends a frame to dst.
func AppendFrame(dst []byte, kind byte, a, b []byte) []byte {
	dst = append(dst, kind)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(a)))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(b)))
	return append(append(dst, a...), b...)
}

// CutFrame takes the first frame off b; ok is false while it is not there whole.
func CutFrame(b []byte) (kind byte, x, y, rest []byte, ok bool, err error) {
	if len(b) < frameHeadBytes {
		return 0, nil, nil, b, false, nil
	}
	n, m := int(binary.LittleEndian.Uint32(b[1:])), int(binary.LittleEndian.Uint32(b[5:]))
	if n > MaxFrameBytes || m > MaxFrameBytes || n+m > MaxFrameBytes {
		return 0, nil, nil, b, false, fmt.Errorf("%w: %d bytes, at most %d", ErrFrame, n+m, MaxFrameBytes)
	}
	if len(b) < frameHeadBytes+n+m {
		return 0, nil, nil, b, false, nil
	}
	return b[0], b[frameHeadBytes : frameHeadBytes+n], b[frameHeadBytes+n : frameHeadBytes+n+m], b[frameHeadBytes+n+m:], true, nil
}

// ReadFrame reads one frame. a and b are valid until the next call with the same buf.
func ReadFrame(r *bufio.Reader, buf []byte) (kind byte, a, b, grown []byte, err error) {
	var head [frameHeadBytes]byte
	if _, err = io.ReadFull(r, head[:]); err != nil {
		return 0, nil, nil, buf, err
	}
	n, m := int(binary.LittleEndian.Uint32(head[1:])), int(binary.LittleEndian.Uint32(head[5:]))
	if n > MaxFrameBytes || m > MaxFrameBytes || n+m > MaxFrameBytes {
		return 0, nil, nil, buf, fmt.Errorf("%w: %d bytes, at most %d", ErrFrame, n+m, MaxFrameBytes)
	}
	if cap(buf) < n+m {
		buf = make([]byte, n+m, max(4096, (n+m)*2))
	}
	buf = buf[:n+m]
	if _, err = io.ReadFull(r, buf); err != nil {
		return 0, nil, nil, buf, err
	}
	return head[0], buf[:n], buf[n:], buf, nil
}

// AppendRecord appends a record: uvarint lengths of key and value, key, value.
func AppendRecord(dst, key, value []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(key)))
	dst = binary.AppendUvarint(dst, uint64(len(value)))
	return append(append(dst, key...), value...)
}

// CutRecord takes the first record off b; ok is false for what is none.
func CutRecord(b []byte) (key, value, rest []byte, ok bool) {
	n, i := binary.Uvarint(b)
	if i <= 0 {
		return nil, nil, b, false
	}
	m, j := binary.Uvarint(b[i:])
	if j <= 0 || n > MaxFrameBytes || m > MaxFrameBytes || uint64(len(b)-i-j) < n+m {
		return nil, nil, b, false
	}
	b = b[i+j:]
	return b[:n:n], b[n : n+m : n+m], b[n+m:], true
}
