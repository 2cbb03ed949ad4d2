package client

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file is the layer of large objects, between the calls of the SDK and slabs. The slab
// of a small object holds the payload. The slab of a large object holds an index: the list
// of the write-once slabs, called chunks, that hold the payload. No other file of this
// package distinguishes the two.
//
// A change of a large object writes new chunks, commits a new index and then frees the old
// chunks. So it linearizes at the commit of the index, like a change of a small object.
//
// Invariant: every chunk that a committed index names is allocated until a later index has
// been committed, or the object has been freed. A reader that finds a chunk freed reads the
// index again.

const (
	// MaxObjectBytes is the largest payload of an object.
	MaxObjectBytes = 64 << 20
	// maxIndexReads bounds how often a call reads an index again because it has changed.
	maxIndexReads = 64
)

var (
	// errIndexChanged: a chunk has been freed, so the index that names it is not the present one.
	errIndexChanged = errors.New("index has changed")
	// errIsLarge: a change of a small object has found an index.
	errIsLarge = errors.New("object is large")
)

// isIndex reports whether an image holds the index of a large object.
func isIndex(image *slab.Info) bool { return image.Tag&proto.TagIndex != 0 }

// content is what an image holds: a payload or an index.
type content struct {
	large   bool
	payload []byte // of a small object; aliases the image
	index   index  // of a large object
}

// contentOf decodes an image. ErrCorrupt if it should be an index and is none.
func contentOf(b []byte, image *slab.Info) (c content, err error) {
	if c.large = isIndex(image); !c.large {
		c.payload = b
		return c, nil
	}
	c.index, err = parseIndex(b)
	return c, err
}

// infoOf describes an object with a payload of n bytes.
func infoOf(image slab.Info, n int64, chunks int) Info {
	return Info{Version: image.Version, Born: image.Born, Tag: image.Tag & proto.MaxUserTag, Bytes: n, Chunks: chunks}
}

// errKeepsChanging is the error of a call that has read an index maxIndexReads times.
func errKeepsChanging(ref Ref) error {
	return fmt.Errorf("%w: %v changed during %d reads", ErrBusy, ref, maxIndexReads)
}

// readObject appends the payload of an object to dst. chunks is 0 for a small object.
func (l *lane) readObject(ref Ref, dst []byte) (out []byte, image slab.Info, chunks int, err error) {
	out, image, err = l.slab.Read(ref, dst)
	if err != nil || !isIndex(&image) {
		return out, image, 0, err
	}
	return l.readLarge(ref, dst, out[len(dst):], image)
}

// readLarge is readObject behind a READ that has returned an image b.
func (l *lane) readLarge(ref Ref, dst, b []byte, image slab.Info) (out []byte, _ slab.Info, chunks int, err error) {
	for range maxIndexReads {
		c, err := contentOf(b, &image)
		if err != nil {
			return dst, image, 0, err
		}
		if !c.large {
			return append(dst, c.payload...), image, 0, nil
		}
		if out, err = l.readChunks(c.index, dst); err != errIndexChanged {
			return out, image, len(c.index.chunks), err
		}
		if b, image, err = l.slab.View(ref); err != nil {
			return dst, image, 0, err
		}
	}
	return dst, image, 0, errKeepsChanging(ref)
}

// viewObject returns the payload of an object. That of a small object is in the lane's
// scratch memory, valid until the lane's next operation.
func (l *lane) viewObject(ref Ref) ([]byte, error) {
	b, image, err := l.slab.View(ref)
	if err != nil || !isIndex(&image) {
		return b, err
	}
	b, _, _, err = l.readLarge(ref, nil, b, image)
	return b, err
}

// statObject describes an object.
func (l *lane) statObject(ref Ref) (Info, error) {
	b, image, err := l.slab.View(ref)
	if err != nil {
		return Info{}, err
	}
	c, err := contentOf(b, &image)
	if err != nil {
		return Info{}, err
	}
	info := infoOf(image, int64(len(c.payload)), 0)
	if c.large {
		info.Bytes, info.Chunks = c.index.bytes, len(c.index.chunks)
	}
	info.Slab = slabKindOf(image.Kind)
	info.WriteOnce = info.Slab == SingleSlab
	return info, nil
}

// readRange is ReadAt on a lane.
func (l *lane) readRange(ref Ref, p []byte, offset int64) (int, error) {
	for range maxIndexReads {
		b, image, err := l.slab.View(ref)
		if err != nil {
			return 0, err
		}
		c, err := contentOf(b, &image)
		if err != nil {
			return 0, err
		}
		if !c.large {
			return copyAt(p, c.payload, offset)
		}
		first, part := c.index.part(offset, len(p))
		b, err = l.readChunks(part, nil)
		if err == nil {
			return copyAt(p, b, offset-first)
		}
		if err != errIndexChanged {
			return 0, err
		}
	}
	return 0, errKeepsChanging(ref)
}

// copyAt is io.ReaderAt.ReadAt of a byte slice.
func copyAt(p, b []byte, offset int64) (int, error) {
	if offset > int64(len(b)) {
		return 0, io.EOF
	}
	n := copy(p, b[offset:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// readObjects is ReadMany on a lane. Small objects are read in batches, large ones afterwards
// and one by one.
func (l *lane) readObjects(refs []Ref, fn func(i int, payload []byte, err error)) error {
	var large []int
	err := l.slab.ReadMany(refs, func(i int, b []byte, image slab.Info, err error) {
		if err == nil && isIndex(&image) {
			large = append(large, i)
			return
		}
		l.parkUntilRound()
		fn(i, b, err)
	})
	for _, i := range large {
		var payload []byte
		one := err
		if one == nil {
			payload, _, _, one = l.readObject(refs[i], nil)
		}
		l.parkUntilRound()
		fn(i, payload, one)
	}
	return err
}

// readChunks appends the chunks of an index to dst. errIndexChanged if one has been freed.
func (l *lane) readChunks(x index, dst []byte) ([]byte, error) {
	out, own, at := dst, len(dst), len(dst)
	if at == 0 && cap(dst) < int(x.bytes) {
		// New memory gets the room in front that reading in place needs (slab.ReadChunks).
		out, own, at = make([]byte, proto.SingleLead+int(x.bytes)), 0, proto.SingleLead
	} else {
		out = slices.Grow(dst, int(x.bytes))[:at+int(x.bytes)]
	}
	switch err := l.slab.ReadChunks(x.chunks, out, own, at, x.chunk); {
	case errors.Is(err, ErrFreed):
		return dst, errIndexChanged
	case err != nil:
		return dst, err
	}
	return out[at-len(dst):], nil
}

// allocObject is Alloc on a lane, with options that checkAlloc has completed.
func (l *lane) allocObject(payload []byte, o AllocOptions) (Ref, error) {
	room := max(len(payload), o.Capacity)
	w := l.want(room, &o)
	if room <= l.slab.MaxPayloadBytes(w.Kind) {
		return l.alloc.Alloc(payload, w)
	}
	x, err := l.writeChunks(payload, w.Home())
	if err != nil {
		return Ref{}, err
	}
	w.Tag |= proto.TagIndex
	w.Capacity = indexRoom(room, l.chunkBytes())
	ref, err := l.alloc.Alloc(x.encode(), w)
	if err != nil && !errors.Is(err, ErrUnknown) {
		l.freeChunks(x.chunks)
	}
	return ref, err
}

// writeChunks allocates the chunks of a payload in regions of a kind. After an error none
// is left.
func (l *lane) writeChunks(payload []byte, h alloc.Home) (index, error) {
	x := index{bytes: int64(len(payload)), chunk: l.chunkBytes()}
	for len(payload) > 0 {
		n := min(len(payload), x.chunk)
		ref, err := Ref{}, l.callerErr()
		if err == nil {
			ref, err = l.alloc.Alloc(payload[:n], alloc.Want{Kind: proto.Single, Replicas: h.Replicas, Durable: h.Durable, Tag: proto.TagChunk})
		}
		if err != nil {
			l.freeChunks(x.chunks)
			return index{}, err
		}
		x.chunks = append(x.chunks, ref)
		payload = payload[n:]
	}
	return x, nil
}

// freeChunks frees chunks that no committed index names. Those that this call has no time to
// free are freed by the Client later. One that is marked BAD stays so until its mark is discarded.
func (l *lane) freeChunks(chunks []Ref) {
	l.extendForCleanup()
	for i, r := range chunks {
		if _, _, err := l.alloc.Free(r); err != nil && !errors.Is(err, ErrFreed) && !errors.Is(err, ErrBad) {
			l.session.client.deferFrees(chunks[i:])
			break
		}
	}
	_ = l.alloc.Tidy()
}

// freeChunksOf frees the chunks of an index that is not committed any more.
func (l *lane) freeChunksOf(encoded []byte) {
	if x, err := parseIndex(encoded); err == nil {
		l.freeChunks(x.chunks)
	}
}

// replace commits what next makes of the present image of an object, a payload or an encoded
// index, and then frees the chunks that the object had before. next may run more than once.
// blind: next looks at no payload.
func (l *lane) replace(ref Ref, blind bool, next func(old []byte, image slab.Info, large bool) (body []byte, index bool, err error)) error {
	var oldIndex []byte
	f := func(old []byte, image *slab.Info) ([]byte, error) {
		large := isIndex(image)
		if oldIndex = oldIndex[:0]; large {
			oldIndex = append(oldIndex, old...)
		}
		body, index, err := next(old, *image, large)
		if image.Tag &^= proto.TagIndex; index {
			image.Tag |= proto.TagIndex
		}
		return body, err
	}
	var err error
	if blind {
		_, err = l.slab.Overwrite(ref, f)
	} else {
		_, err = l.slab.Update(ref, f)
	}
	if err == nil && len(oldIndex) > 0 {
		l.freeChunksOf(oldIndex)
	}
	return err
}

// updateObject is Update on a lane.
func (l *lane) updateObject(ref Ref, f func(old []byte) ([]byte, error)) error {
	err := errContended
	if !l.byNode(ref) {
		err = l.updateSmall(ref, f)
	}
	if err != nil && errors.Is(err, errContended) {
		answered := false
		if answered, err = l.updateByNode(ref, f); answered {
			return err
		}
		err = l.updateSmall(ref, f)
	}
	if err != nil && errors.Is(err, errIsLarge) {
		return l.updateLarge(ref, f)
	}
	return err
}

// updateSmall is updateObject of an object that is not large, by the client's own verbs; errIsLarge of others.
func (l *lane) updateSmall(ref Ref, f func(old []byte) ([]byte, error)) error {
	return l.replace(ref, false, func(old []byte, _ slab.Info, large bool) ([]byte, bool, error) {
		if large {
			return nil, false, errIsLarge
		}
		payload, err := l.runCallback(f, old)
		return payload, false, err
	})
}

// updateLarge is updateObject of an object that was large. f runs without a reservation on a
// payload that has been read; the commit names the version of that payload.
func (l *lane) updateLarge(ref Ref, f func(old []byte) ([]byte, error)) error {
	l.help.wanted = false // no node changes large objects
	for attempt := 1; attempt <= maxIndexReads; attempt++ {
		old, image, _, err := l.readObject(ref, nil)
		if err != nil {
			return err
		}
		payload, err := l.runCallback(f, old)
		if err != nil {
			return err
		}
		if err = l.writeLarge(ref, payload, image.Version); !errors.Is(err, ErrConflict) {
			return err
		}
		if err := l.Pause(attempt); err != nil {
			return err
		}
	}
	return errKeepsChanging(ref)
}

// runCallback runs the callback of an Update. Meanwhile the lane is parked.
func (l *lane) runCallback(f func(old []byte) ([]byte, error), old []byte) ([]byte, error) {
	l.parkForCallback()
	payload, err := f(old)
	l.unparkAfterCallback()
	if err == nil {
		err = l.callerErr()
	}
	return payload, err
}

// writeObject replaces the payload of an object that is at a version, or at any.
func (l *lane) writeObject(ref Ref, payload []byte, version uint64) error {
	if len(payload) > l.slab.MaxPayloadBytes(proto.Pair) {
		return l.writeLarge(ref, payload, version)
	}
	err := errContended
	if !l.byNode(ref) {
		err = l.writeSmall(ref, payload, version)
	}
	if err != nil && errors.Is(err, errContended) {
		answered := false
		if answered, err = l.writeByNode(ref, payload, version); answered {
			return err
		}
		err = l.writeSmall(ref, payload, version)
	}
	if err != nil && errors.Is(err, errIsLarge) {
		return l.writeLarge(ref, payload, version)
	}
	return err
}

// writeSmall is writeObject where neither the old nor the new payload needs chunks, by the client's own verbs; errIsLarge of others.
func (l *lane) writeSmall(ref Ref, payload []byte, version uint64) error {
	return l.replace(ref, true, func(_ []byte, image slab.Info, large bool) ([]byte, bool, error) {
		if err := wantVersion(image, version); err != nil {
			return nil, false, err
		}
		if large {
			return nil, false, errIsLarge
		}
		return payload, false, l.callerErr()
	})
}

// wantVersion is ErrConflict unless an image is at a version.
func wantVersion(image slab.Info, version uint64) error {
	if version != anyVersion && image.Version != version {
		return fmt.Errorf("%w: %d, not %d", ErrConflict, image.Version, version)
	}
	return nil
}

// writeLarge is writeObject where the old or the new payload needs chunks. An object that has an index keeps
// one, also for a short payload. Without the index the next writer could not tell that the object may have
// chunks.
func (l *lane) writeLarge(ref Ref, payload []byte, version uint64) error {
	l.help.wanted = false // no node changes large objects
	reg, err := l.Region(ref.Addr.Region())
	if err != nil {
		return err
	}
	if len(payload) > MaxObjectBytes {
		return fmt.Errorf("%w: %d bytes, an object holds at most %d", ErrTooLarge, len(payload), MaxObjectBytes)
	}
	// Learn the size of the slab before any chunk is written.
	_, image, err := l.slab.View(ref)
	if err != nil {
		return err
	}
	if image.Kind == proto.Single {
		return fmt.Errorf("%w: %v", ErrImmutable, ref)
	}
	room := image.Class.PayloadBytes(image.Kind) - l.slab.Overhead()
	body, large := payload, len(payload) > room || isIndex(&image)
	var x index
	if large {
		if need := indexRoom(len(payload), l.chunkBytes()); need > room {
			return fmt.Errorf("%w: %d bytes need an index of %d, this object has room for %d", ErrTooLarge, len(payload), need, room)
		}
		if x, err = l.writeChunks(payload, alloc.Home{Replicas: reg.Replicas(), Durable: reg.Durable}); err != nil {
			return err
		}
		body = x.encode()
	}
	err = l.replace(ref, true, func(_ []byte, image slab.Info, _ bool) ([]byte, bool, error) {
		if err := wantVersion(image, version); err != nil {
			return nil, false, err
		}
		return body, large, l.callerErr()
	})
	if err != nil && !errors.Is(err, ErrUnknown) {
		l.freeChunks(x.chunks)
	}
	return err
}

// writeObjects is WriteMany on a lane. Small objects are written in batches, large ones
// afterwards and one by one.
func (l *lane) writeObjects(refs []Ref, payloads [][]byte, errs []error) {
	l.slab.WriteMany(refs, payloads, errs)
	for i, err := range errs {
		if errors.Is(err, slab.ErrIndex) || errors.Is(err, ErrTooLarge) {
			errs[i] = l.writeObject(refs[i], payloads[i], anyVersion)
		}
	}
}

// updateObjects is UpdateMany on a lane. Small objects are changed in batches, large ones afterwards and one by one.
func (l *lane) updateObjects(refs []Ref, f func(i int, old []byte) ([]byte, error), errs []error) {
	l.slab.UpdateMany(refs, func(i int, old []byte, image *slab.Info) ([]byte, error) {
		if isIndex(image) {
			return nil, errIsLarge
		}
		l.parkUntilRound()
		payload, err := f(i, old)
		if err == nil {
			err = l.callerErr()
		}
		return payload, err
	}, errs)
	for i, err := range errs {
		if err != nil && errors.Is(err, errIsLarge) {
			errs[i] = l.updateObject(refs[i], func(old []byte) ([]byte, error) { return f(i, old) })
		}
	}
}

// freeObject is Free and CompareAndFree on a lane.
func (l *lane) freeObject(ref Ref, version uint64) error {
	var last []byte
	var image slab.Info
	var err error
	if version == anyVersion {
		last, image, err = l.alloc.Free(ref)
	} else {
		last, image, err = l.alloc.FreeVersion(ref, version)
	}
	if err != nil {
		return err
	}
	if isIndex(&image) {
		l.freeChunksOf(bytes.Clone(last))
	}
	// The object is freed. Map bits that Tidy cannot clear now are left to the scrub.
	_ = l.alloc.Tidy()
	return nil
}
