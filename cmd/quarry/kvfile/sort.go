package kvfile

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

const (
	// MinSortBytes is the least memory of a Sorter.
	MinSortBytes = 1 << 20
	// chunkBytes is how much memory for entries is taken at a time.
	chunkBytes = 4 << 20
	// fanIn is how many runs are merged at a time: their buffers and open files.
	fanIn = 64
	// indexBytes is what an entry takes beside its bytes, while the index grows.
	indexBytes = 32
)

// Sorter puts entries in the order of their keys in bounded memory: what exceeds it goes to files, as
// sorted runs that are merged when they are read. The files have no names, so nothing is left of them
// however the process ends.
type Sorter struct {
	memory int
	used   int
	chunks [][]byte // records: line, key bytes, key, value bytes, value
	index  []place
	levels [][]*sortedRun // runs of level l+1 are fanIn merged runs of level l; older ones first
	added  int
}

// place is where the record of an entry is. Later entries are at higher places.
type place struct {
	head      uint64 // of the key, behind the prefix of all keys
	chunk, at uint32
}

// sortedRun is a file of records in the order of their keys, each key once.
type sortedRun struct {
	file  *os.File
	bytes int64
}

// NewSorter makes a sorter that keeps about so many bytes in memory, at least MinSortBytes, and one
// entry.
func NewSorter(memory int) *Sorter { return &Sorter{memory: max(memory, MinSortBytes)} }

// Added is how many entries have been added.
func (s *Sorter) Added() int { return s.added }

// Spilled is how many runs are in files.
func (s *Sorter) Spilled() (n int) {
	for _, l := range s.levels {
		n += len(l)
	}
	return n
}

// Add takes a copy of an entry. line is for errors about it.
func (s *Sorter) Add(key, value []byte, line int) error {
	size := len(key) + len(value) + 3*binary.MaxVarintLen32
	if s.used+size+indexBytes > s.memory && len(s.index) > 0 {
		if err := s.spill(); err != nil {
			return err
		}
	}
	last := len(s.chunks) - 1
	if last < 0 || cap(s.chunks[last])-len(s.chunks[last]) < size {
		s.chunks = append(s.chunks, make([]byte, 0, max(min(chunkBytes, s.memory/4), size)))
		last++
	}
	b := s.chunks[last]
	s.index = append(s.index, place{chunk: uint32(last), at: uint32(len(b))})
	s.chunks[last] = appendRecord(b, key, value, line)
	s.used += size + indexBytes
	s.added++
	return nil
}

func appendRecord(b, key, value []byte, line int) []byte {
	b = binary.AppendUvarint(b, uint64(line))
	b = append(binary.AppendUvarint(b, uint64(len(key))), key...)
	return append(binary.AppendUvarint(b, uint64(len(value))), value...)
}

// record decodes the entry at a place.
func (s *Sorter) record(p place) Entry {
	b := s.chunks[p.chunk][p.at:]
	next := func() int {
		v, n := binary.Uvarint(b)
		b = b[n:]
		return int(v)
	}
	var e Entry
	e.Line = next()
	n := next()
	e.Key, b = b[:n], b[n:]
	n = next()
	e.Value = b[:n]
	return e
}

// sort orders the index. Of equal keys only the last stays.
func (s *Sorter) sort() {
	if len(s.index) == 0 {
		return
	}
	// Heads of what all keys begin with would all be the same.
	first := s.record(s.index[0]).Key
	prefix := len(first)
	for _, p := range s.index {
		k := s.record(p).Key
		prefix = min(prefix, len(k))
		for !bytes.Equal(first[:prefix], k[:prefix]) {
			prefix--
		}
	}
	for i := range s.index {
		var head [8]byte
		copy(head[:], s.record(s.index[i]).Key[prefix:])
		s.index[i].head = binary.BigEndian.Uint64(head[:])
	}
	key := func(p place) []byte { return s.record(p).Key }
	slices.SortFunc(s.index, func(a, b place) int {
		switch {
		case a.head < b.head:
			return -1
		case a.head > b.head:
			return 1
		}
		if c := bytes.Compare(key(a), key(b)); c != 0 {
			return c
		}
		return int(int64(a.chunk)<<32|int64(a.at)) - int(int64(b.chunk)<<32|int64(b.at))
	})
	out := s.index[:0]
	for i, p := range s.index {
		if i+1 < len(s.index) && p.head == s.index[i+1].head && bytes.Equal(key(p), key(s.index[i+1])) {
			continue
		}
		out = append(out, p)
	}
	s.index = out
}

// spill writes what is in memory to a run.
func (s *Sorter) spill() error {
	s.sort()
	i := 0
	r, err := newRun(func() (Entry, error) {
		if i == len(s.index) {
			return Entry{}, io.EOF
		}
		i++
		return s.record(s.index[i-1]), nil
	})
	if err != nil {
		return err
	}
	s.chunks, s.index, s.used = nil, s.index[:0], 0
	return s.keep(r, 0)
}

// keep adds a run to a level, and merges a level that is full.
func (s *Sorter) keep(r *sortedRun, level int) error {
	if level == len(s.levels) {
		s.levels = append(s.levels, nil)
	}
	s.levels[level] = append(s.levels[level], r)
	if len(s.levels[level]) < fanIn {
		return nil
	}
	merged, err := newRun(newMerge(s.levels[level]).Next)
	if err != nil {
		return err
	}
	for _, r := range s.levels[level] {
		_ = r.file.Close()
	}
	s.levels[level] = s.levels[level][:0]
	return s.keep(merged, level+1)
}

// newRun writes entries to a file until io.EOF.
func newRun(next func() (Entry, error)) (r *sortedRun, err error) {
	f, err := os.CreateTemp("", "quarry-sort-*")
	if err != nil {
		return nil, sortError(err)
	}
	// Unlinked at once: the space is free again when the file is closed, also by a SIGKILL.
	if err = os.Remove(f.Name()); err == nil {
		r = &sortedRun{file: f}
		err = r.write(next)
	}
	if err != nil {
		_ = f.Close()
		return nil, sortError(err)
	}
	return r, nil
}

func (r *sortedRun) write(next func() (Entry, error)) error {
	w := bufio.NewWriterSize(r.file, 1<<20)
	var head []byte
	for {
		e, err := next()
		if err == io.EOF {
			return w.Flush()
		} else if err != nil {
			return err
		}
		head = binary.AppendUvarint(head[:0], uint64(e.Line))
		head = append(binary.AppendUvarint(head, uint64(len(e.Key))), e.Key...)
		head = binary.AppendUvarint(head, uint64(len(e.Value)))
		r.bytes += int64(len(head) + len(e.Value))
		if _, err := w.Write(head); err != nil {
			return err
		}
		if _, err := w.Write(e.Value); err != nil {
			return err
		}
	}
}

// Entries are the entries added so far in rising order of keys, of each key the last that was added.
// It may be called again, to begin anew; nothing may be added meanwhile.
func (s *Sorter) Entries() (*Entries, error) {
	if len(s.levels) == 0 {
		s.sort()
		i := 0
		return &Entries{memory: func() (Entry, error) {
			if i == len(s.index) {
				return Entry{}, io.EOF
			}
			i++
			return s.record(s.index[i-1]), nil
		}}, nil
	}
	if len(s.index) > 0 {
		if err := s.spill(); err != nil {
			return nil, err
		}
	}
	var runs []*sortedRun
	for _, l := range slices.Backward(s.levels) {
		runs = append(runs, l...)
	}
	return newMerge(runs), nil
}

// Close gives memory and files back.
func (s *Sorter) Close() error {
	var err error
	for _, l := range s.levels {
		for _, r := range l {
			err = errors.Join(err, r.file.Close())
		}
	}
	s.levels, s.chunks, s.index = nil, nil, nil
	return err
}

func sortError(err error) error {
	return fmt.Errorf("sorting in %s: %w (TMPDIR names another folder, more memory needs less of it)", os.TempDir(), err)
}
