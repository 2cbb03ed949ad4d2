package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// ReadChunks reads the payloads of write-once slabs into dst[at:], one behind the
// other: size bytes each, the last one what is left. Everything from own on may have
// been overwritten when it fails; the bytes before own are the caller's, and are not
// written at any time. ErrFreed when one of the slabs has been freed.
//
// Where verbs run in this process a slab is READ straight to where its payload
// belongs, and what the slab has in front of it is laid over the bytes before for
// as long as the checksum is computed: one pass over cold memory and one over the cache
// instead of three. Elsewhere, and for what a concurrent change disturbs, it is
// ReadMany.
func (l *Lane) ReadChunks(refs []proto.Ref, dst []byte, own, at, size int) error {
	b := &l.batch
	b.rest, b.ats = b.rest[:0], b.ats[:0]
	place := func(at int) []byte { return dst[at:min(at+size, len(dst))] }
	for _, ref := range refs {
		if err := l.port.Pause(0); err != nil {
			return err
		}
		done := false
		if at-proto.SingleLead >= own {
			var err error
			if done, err = l.readInPlace(ref, dst, at, len(place(at))); err != nil {
				return err
			}
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
// dst[at]. false: it did not, and the payload is to be read in another way. The
// proto.SingleLead bytes before change for as long as the READ and the checksum take.
//
// Linearizes like Read: V, header and payload come from one READ of unordered
// lines, and the checksum tells whether they belong together.
func (l *Lane) readInPlace(ref proto.Ref, dst []byte, at, n int) (bool, error) {
	var k reading
	if err := l.resolve(&k.object, ref); err != nil {
		if errors.Is(err, errAgain) {
			return false, nil
		}
		return false, err
	}
	if !k.reg.Local || l.encryption != nil || k.slab.Kind != proto.Single || n > k.slab.Class.PayloadBytes(proto.Single) {
		return false, nil
	}
	k.off, k.buf = k.slab.Off, dst[at-proto.SingleLead:at+n]
	var lent [proto.SingleLead]byte
	copy(lent[:], k.buf)
	if l.readRound(&k); !k.lost {
		l.judgeRead(&k)
	}
	copy(k.buf, lent[:])
	switch {
	case k.lost:
		return false, l.settle(k.reg)
	case k.state == imageFreed:
		return false, l.answer(ErrFreed)
	case k.state != imageLive || proto.IsEncrypted(k.header.Tag):
		return false, nil
	case k.header.Length != n:
		return false, chunkLength(ref, k.header.Length, n)
	}
	return true, l.answer(nil)
}
