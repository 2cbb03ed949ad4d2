package kvfile

import (
	"bufio"
	"bytes"
	"container/heap"
	"encoding/binary"
	"fmt"
	"io"
)

// mergeBytes is the buffer of a run that is read.
const mergeBytes = 256 << 10

// Entry is an entry of a file.
type Entry struct {
	Key, Value []byte
	Line       int
}

// Entries are sorted entries: those in memory, or those of runs.
type Entries struct {
	memory func() (Entry, error)
	heads  heads
	last   []byte // key of the entry that was returned
	begun  bool
	err    error
}

// newMerge merges runs, older ones first: of equal keys the newest stays.
func newMerge(runs []*sortedRun) *Entries {
	e := &Entries{}
	for age, r := range runs {
		h := &runHead{age: age, in: bufio.NewReaderSize(io.NewSectionReader(r.file, 0, r.bytes), mergeBytes)}
		switch err := h.read(); err {
		case nil:
			e.heads = append(e.heads, h)
		case io.EOF:
		default:
			e.err = err
		}
	}
	heap.Init(&e.heads)
	return e
}

// Next is the next entry, valid until the next call; io.EOF at the end.
func (e *Entries) Next() (Entry, error) {
	if e.memory != nil {
		return e.memory()
	}
	for e.err == nil && len(e.heads) > 0 {
		h := e.heads[0]
		if !e.begun || !bytes.Equal(h.entry.Key, e.last) {
			e.begun, e.last = true, append(e.last[:0], h.entry.Key...)
			return h.entry, nil
		}
		// Returned by the last call, or older than what was.
		switch err := h.read(); err {
		case nil:
			heap.Fix(&e.heads, 0)
		case io.EOF:
			heap.Pop(&e.heads)
		default:
			e.err = err
		}
	}
	if e.err != nil {
		return Entry{}, e.err
	}
	return Entry{}, io.EOF
}

// runHead is a run that is read, and its next entry.
type runHead struct {
	in    *bufio.Reader
	age   int
	entry Entry
	buf   []byte
}

// read reads the next entry.
func (h *runHead) read() error {
	line, err := binary.ReadUvarint(h.in)
	if err != nil {
		return err // io.EOF at the end
	}
	key, err := binary.ReadUvarint(h.in)
	if err == nil {
		h.buf, err = readBytes(h.in, h.buf[:0], key)
	}
	var value uint64
	if err == nil {
		value, err = binary.ReadUvarint(h.in)
	}
	if err == nil {
		h.buf, err = readBytes(h.in, h.buf, value)
	}
	if err != nil {
		return fmt.Errorf("reading back what was sorted: %w", noEOF(err))
	}
	h.entry = Entry{Key: h.buf[:key:key], Value: h.buf[key:], Line: int(line)}
	return nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readBytes appends the next n bytes.
func readBytes(r io.Reader, b []byte, n uint64) ([]byte, error) {
	if n > MaxLineBytes {
		return b, fmt.Errorf("an entry of %d bytes", n)
	}
	at := len(b)
	b = append(b, make([]byte, n)...)
	_, err := io.ReadFull(r, b[at:])
	return b, err
}

// heads is a heap of runs, the least key first, of equal keys the newest.
type heads []*runHead

func (h heads) Len() int      { return len(h) }
func (h heads) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *heads) Push(x any)   { *h = append(*h, x.(*runHead)) }

func (h heads) Less(i, j int) bool {
	c := bytes.Compare(h[i].entry.Key, h[j].entry.Key)
	return c < 0 || c == 0 && h[i].age > h[j].age
}

func (h *heads) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
