package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// ReadChunks reads the payloads of write-once slabs into dst[at:], one behind the
// other: size bytes each, the last one what is left. Everything behind at may have
// been overwritten when it fails. ErrFreed when one of the slabs has been freed.
//
// Where verbs run in this process a slab is READ straight to where its payload
// belongs, and what the slab has in front of it is laid over the bytes before for
// as long as the seal is checked: one pass over cold memory and one over the cache
// instead of three. Elsewhere, and for what a concurrent change disturbs, it is
// ReadMany.
func (l *Lane) ReadChunks(refs []proto.Ref, dst []byte, at, size int) error {
	b := &l.batch
	b.rest, b.ats = b.rest[:0], b.ats[:0]
	place := func(at int) []byte { return dst[at:min(at+size, len(dst))] }
	for _, ref := range refs {
		done, err := l.readInPlace(ref, dst, at, len(place(at)))
		if err != nil {
			return err
		}
		if !done {
			b.rest, b.ats = append(b.rest, ref), append(b.ats, at)
		}
		at += size
	}
	if len(b.rest) == 0 {
		return nil
	}
	var failed error
	err := l.ReadMany(b.rest, func(i int, payload []byte, _ Info, err error) {
		if err == nil && len(payload) != len(place(b.ats[i])) {
			err = chunkLength(b.rest[i], len(payload), len(place(b.ats[i])))
		}
		if err != nil {
			failed = err
			return
		}
		copy(place(b.ats[i]), payload)
	})
	if err != nil {
		return err
	}
	return failed
}

func chunkLength(ref proto.Ref, got, want int) error {
	return fmt.Errorf("%w: chunk %v has %d bytes, its index says %d", ErrCorrupt, ref, got, want)
}

// readInPlace READs a SINGLE slab so that its payload of n bytes comes to stand at
// dst[at]. false: it did not, read it in another way.
//
// Linearizes like Read: V, header and payload come from one READ of unordered
// lines, and the seal tells whether they belong together.
func (l *Lane) readInPlace(ref proto.Ref, dst []byte, at, n int) (bool, error) {
	if err := l.begin(ref); err != nil {
		if errors.Is(err, errAgain) {
			return false, nil
		}
		return false, err
	}
	o := &l.op
	if !o.reg.Local || o.slab.Kind != proto.Single || at < proto.SingleLead || n > o.slab.Class.PayloadBytes(proto.Single) {
		return false, nil
	}
	buf := dst[at-proto.SingleLead : at+n]
	var lent [proto.SingleLead]byte
	copy(lent[:], buf)
	l.round.Reset()
	l.round.Chain(o.reg.P()).Read(o.slab.Off, buf)
	l.do()
	failed := l.round.At(0).Err != nil
	vw, _, h, _ := l.lookIn(o, o.slab.Off, buf)
	copy(buf, lent[:])
	switch {
	case failed:
		return false, l.settle(o.reg)
	case vw == viewFreed:
		return false, l.answer(ErrFreed)
	case vw != viewLive:
		return false, nil
	case h.Length != n:
		return false, chunkLength(ref, h.Length, n)
	}
	return true, l.answer(nil)
}
