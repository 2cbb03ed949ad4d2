package job

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/proto"
)

const (
	// spillBytes of records are sorted, combined and written at a time.
	spillBytes = 64 << 20
	// runBytes is the size of one object of a run: the memory of a reader of the run.
	runBytes = 4 << 20
	// startBytes is what a start takes.
	startBytes = 16
)

// shuffle collects the records that a map part emits and writes them as sorted runs.
type shuffle struct {
	ctx     context.Context                                                          // of the attempt
	c       *client.Client                                                           // whose session the runs belong to until the part is recorded as done
	combine func(groups iter.Seq2[[]byte, iter.Seq[[]byte]], emit coproc.Emit) error // nil: none
	buckets []bucket                                                                 // one for each reduce part
	bytes   int                                                                      // in all buckets now, with startBytes for each record
	limit   int                                                                      // of bytes, at which all buckets are spilled
	runs    [][][]proto.Ref                                                          // of each bucket: runs, each a list of objects
	wrote   *atomic.Uint64                                                           // bytes
	note    func(ref proto.Ref, bytes int) error                                     // records an object in the attempt's manifest
}

// bucket holds the records for one reduce part: their bytes one after the other, and their starts.
type bucket struct {
	data   []byte  // records as coproc.AppendRecord writes them
	starts []start // of the records in data; in the order of their keys after sort
}

// start of a record. head is the beginning of its key, big endian, so that most
// comparisons need not look at the key.
type start struct {
	head uint64 // first 8 bytes of the key, padded with zeros
	at   int    // offset in bucket.data
}

// add appends a record.
func (b *bucket) add(key, value []byte) {
	var head [8]byte
	copy(head[:], key)
	b.starts = append(b.starts, start{binary.BigEndian.Uint64(head[:]), len(b.data)})
	b.data = coproc.AppendRecord(b.data, key, value)
}

// key is the key of the record at s.
func (b *bucket) key(s start) []byte {
	k, _, _, _ := coproc.CutRecord(b.data[s.at:])
	return k
}

// sort puts records in the order of their keys, those of one key as they came.
func (b *bucket) sort() {
	slices.SortFunc(b.starts, func(x, y start) int {
		if x.head != y.head {
			return cmp.Compare(x.head, y.head)
		}
		return cmp.Or(bytes.Compare(b.key(x), b.key(y)), cmp.Compare(x.at, y.at))
	})
}

// newShuffle makes an empty shuffle for so many reduce parts.
func newShuffle(ctx context.Context, c *client.Client, reduces int) *shuffle {
	return &shuffle{ctx: ctx, c: c, buckets: make([]bucket, reduces), limit: spillBytes, wrote: new(atomic.Uint64), note: func(proto.Ref, int) error { return nil }, runs: make([][][]proto.Ref, reduces)}
}

// bucketOf must give a key the same bucket in every build and process: parts run again elsewhere.
func bucketOf(key []byte, n int) int { return int(xxh3.Hash(key) % uint64(n)) }

// emit puts a record into the bucket of its reduce part, and writes runs when the buckets are
// full.
func (s *shuffle) emit(key, value []byte) error {
	b := &s.buckets[bucketOf(key, len(s.buckets))]
	before := len(b.data)
	b.add(key, value)
	if s.bytes += len(b.data) - before + startBytes; s.bytes >= s.limit {
		return s.spill()
	}
	return nil
}

// spill writes one run for each bucket that has records.
func (s *shuffle) spill() error {
	for i := range s.buckets {
		b := &s.buckets[i]
		if len(b.starts) == 0 {
			continue
		}
		w := &runWriter{ctx: s.ctx, c: s.c, wrote: s.wrote, note: s.note}
		err := b.each(s.combine, w.add)
		if err == nil {
			err = w.flush()
		}
		s.runs[i] = append(s.runs[i], w.refs)
		if err != nil {
			return err
		}
		b.data, b.starts = b.data[:0], b.starts[:0]
	}
	s.bytes = 0
	return nil
}

// each gives out the records of a bucket by key, combined if there is something
// to combine them with.
func (b *bucket) each(combine func(iter.Seq2[[]byte, iter.Seq[[]byte]], coproc.Emit) error, emit coproc.Emit) error {
	b.sort()
	if combine == nil {
		for _, s := range b.starts {
			k, v, _, _ := coproc.CutRecord(b.data[s.at:])
			if err := emit(k, v); err != nil {
				return err
			}
		}
		return nil
	}
	i := 0
	groups := func(yield func([]byte, iter.Seq[[]byte]) bool) {
		for i < len(b.starts) {
			k := b.key(b.starts[i])
			values := func(yield func([]byte) bool) {
				for i < len(b.starts) {
					next, v, _, _ := coproc.CutRecord(b.data[b.starts[i].at:])
					if !bytes.Equal(next, k) {
						return
					}
					i++
					if !yield(v) {
						return
					}
				}
			}
			if !yield(k, values) {
				return
			}
			for range values {
			}
		}
	}
	// A combiner may emit out of order, and a run is sorted.
	out := bucket{}
	err := combine(groups, func(k, v []byte) error {
		out.add(k, v)
		return nil
	})
	if err != nil {
		return err
	}
	return out.each(nil, emit)
}

// end writes what is left and returns the objects of each bucket. Runs follow one
// another; a run ends where keys fall.
func (s *shuffle) end() ([][][]proto.Ref, error) {
	err := s.spill()
	return s.runs, err
}

// drop frees everything that has been written.
func (s *shuffle) drop(ctx context.Context) {
	for _, runs := range s.runs {
		for _, refs := range runs {
			freeRefs(ctx, s.c, refs)
		}
	}
}

// freeRefs frees objects. One that fails is freed by another attempt, or is an orphan.
func freeRefs(ctx context.Context, c *client.Client, refs []proto.Ref) {
	for _, r := range refs {
		_ = c.Free(ctx, r) // freed by another attempt, or left to the scrub
	}
}

// runWriter cuts records into objects.
type runWriter struct {
	ctx   context.Context                      // of the attempt
	c     *client.Client                       // allocates the objects
	buf   []byte                               // records of the object that is not written yet; up to runBytes and one record
	refs  []proto.Ref                          // of the objects written, in the order of keys
	wrote *atomic.Uint64                       // bytes, shared by the writers of an attempt
	note  func(ref proto.Ref, bytes int) error // records an object in the attempt's manifest
}

// add appends a record to the run.
func (w *runWriter) add(key, value []byte) error {
	w.buf = coproc.AppendRecord(w.buf, key, value)
	if len(w.buf) >= runBytes {
		return w.flush()
	}
	return nil
}

// flush writes the records so far as an object of the run.
func (w *runWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	ref, err := w.c.Alloc(w.ctx, w.buf, client.AllocOptions{WriteOnce: true})
	if err != nil {
		return fmt.Errorf("shuffle: %w", err)
	}
	n := len(w.buf)
	w.wrote.Add(uint64(n))
	w.refs, w.buf = append(w.refs, ref), w.buf[:0]
	return w.note(ref, n)
}

// runReader gives out the records of a run. Errors are sticky and end it.
type runReader struct {
	ctx   context.Context // of the attempt
	c     *client.Client  // reads the objects
	refs  []proto.Ref     // of the objects not yet read
	read  *reading        // counts records and bytes
	buf   []byte          // the present object; the slices below point into it
	rest  []byte          // of buf, not given out yet
	key   []byte          // of the present record, until the next call of next
	value []byte          // of the present record, until the next call of next
	order int             // place of the run: records of one key come in the order of runs
	err   error           // of the first failure; final
}

// next moves to the next record; false at the end, and after an error.
func (r *runReader) next() bool {
	for len(r.rest) == 0 {
		if len(r.refs) == 0 || r.err != nil {
			return false
		}
		if r.buf, r.err = r.c.Read(r.ctx, r.refs[0], r.buf[:0]); r.err != nil {
			return false
		}
		r.rest, r.refs = r.buf, r.refs[1:]
		r.read.to.objects.Add(1)
	}
	var ok bool
	if r.key, r.value, r.rest, ok = coproc.CutRecord(r.rest); !ok {
		r.err = errors.New("shuffle: a run is damaged")
	}
	r.read.note(len(r.key) + len(r.value))
	return ok
}

// readers is a heap by key, then by the order of runs.
type readers []*runReader

// Len, Less, Swap, Push and Pop are heap.Interface: the reader with the smallest key comes first.
func (h readers) Len() int { return len(h) }
func (h readers) Less(i, j int) bool {
	if c := bytes.Compare(h[i].key, h[j].key); c != 0 {
		return c < 0
	}
	return h[i].order < h[j].order
}
func (h readers) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *readers) Push(x any)   { *h = append(*h, x.(*runReader)) }
func (h *readers) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// merge groups the records of all runs by key. fail receives the error that ends it early.
func merge(ctx context.Context, c *client.Client, runs [][]proto.Ref, read *reading, fail *error) iter.Seq2[[]byte, iter.Seq[[]byte]] {
	return func(yield func([]byte, iter.Seq[[]byte]) bool) {
		var h readers
		for i, refs := range runs {
			r := &runReader{ctx: ctx, c: c, refs: refs, read: read, order: i}
			if r.next() {
				h = append(h, r)
			} else if r.err != nil {
				*fail = r.err
				return
			}
		}
		heap.Init(&h)
		// advance moves the first reader to its next record; slices of the former one become invalid.
		advance := func() bool {
			if h[0].next() {
				heap.Fix(&h, 0)
				return true
			}
			r := heap.Pop(&h).(*runReader)
			*fail = r.err
			return r.err == nil
		}
		var key, value []byte
		for len(h) > 0 {
			key = append(key[:0], h[0].key...)
			values := func(yield func([]byte) bool) {
				for *fail == nil && len(h) > 0 && bytes.Equal(h[0].key, key) {
					value = append(value[:0], h[0].value...)
					if !advance() || !yield(value) {
						return
					}
				}
			}
			if !yield(key, values) || *fail != nil {
				return
			}
			for range values {
			}
			if *fail != nil {
				return
			}
		}
	}
}
