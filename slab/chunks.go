package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// ReadChunks reads the payloads of write-once slabs into dst[at:], one behind the other: size
// bytes each, the last one the rest. ErrFreed: one of the slabs has been freed. If it fails,
// everything from own on may have been overwritten. The bytes before own are the caller's, and
// are never written.
//
// Where this process executes the verbs, a slab is READ to the place where its payload belongs.
// The words and header in front of the payload then lie over the bytes before for as long as the
// checksum is computed; those bytes are saved and put back. That takes one pass over cold memory
// and one over the cache, instead of three. Elsewhere, and where a concurrent change disturbs the
// READ, it is ReadMany.
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

// readInPlace READs a SINGLE slab so that its payload of n bytes lies at dst[at]. false: it does
// not, and the payload has to be read in another way. The proto.SingleLead bytes before at are
// changed for as long as the READ and the checksum take.
//
// Linearizes at: the READ, as in Read. V, header and payload come from one READ, whose lines may
// be of different moments; the checksum shows whether they belong together.
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
	k.first = true // the memory of dst is for verbs of this process alone
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
	case k.open:
		return false, nil
	case k.state == imageFreed:
		return false, l.answer(ErrFreed)
	case k.state != imageLive || proto.IsEncrypted(k.header.Tag):
		return false, nil
	case k.header.Length != n:
		return false, chunkLength(ref, k.header.Length, n)
	}
	return true, l.answer(nil)
}
