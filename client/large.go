package client

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

// Objects above one slab are lists of write-once slabs behind one index slab:
//
//	index payload   | bytes:8 | chunk bytes:8 | ref:16 | ref:16 | ...
//
// A change writes new chunks, commits a new index and frees the old chunks, so it
// takes effect at the commit of the index like any other.
const (
	// MaxObjectBytes is the largest payload of an object.
	MaxObjectBytes = 64 << 20
	indexBytes     = 16
	// chunkClass: small enough that a chunk is sealed and copied from the cache,
	// large enough that an index of 64 MiB is one small slab.
	chunkClass = proto.Class(12) // 256 KiB
	// maxIndexReads bounds how often a reader finds the index changed meanwhile.
	maxIndexReads = 64
)

var (
	// errMoved: a chunk is gone, the index has changed meanwhile.
	errMoved = errors.New("index has changed")
	// errIsLarge leaves the fast path: the slab is an index.
	errIsLarge = errors.New("object of several slabs")
)

// chunkBytes is the payload of every chunk but the last.
func chunkBytes() int { return chunkClass.PayloadBytes(proto.Single) }

type index struct {
	bytes  int64
	chunks []Ref
}

func (x index) encode() []byte {
	b := make([]byte, indexBytes, indexBytes+proto.RefBytes*len(x.chunks))
	proto.PutWord(b, 0, uint64(x.bytes))
	proto.PutWord(b, 8, uint64(chunkBytes()))
	for _, r := range x.chunks {
		b, _ = r.AppendBinary(b)
	}
	return b
}

// parseIndex reads what a seal has vouched for; it checks all the same.
func parseIndex(b []byte) (index, error) {
	if len(b) < indexBytes || (len(b)-indexBytes)%proto.RefBytes != 0 {
		return index{}, fmt.Errorf("%w: index slab of %d bytes", ErrCorrupt, len(b))
	}
	x := index{bytes: int64(proto.Word(b, 0))}
	size := int64(proto.Word(b, 8))
	for at := indexBytes; at < len(b); at += proto.RefBytes {
		x.chunks = append(x.chunks, proto.DecodeRef(b[at:]))
	}
	if n := int64(len(x.chunks)); x.bytes < 0 || x.bytes > MaxObjectBytes || size != int64(chunkBytes()) || n != (x.bytes+size-1)/size {
		return index{}, fmt.Errorf("%w: index of %d bytes in %d chunks of %d", ErrCorrupt, x.bytes, n, size)
	}
	return x, nil
}

// indexRoom is the payload of an index for an object of so many bytes.
func indexRoom(n int) int {
	return indexBytes + proto.RefBytes*((n+chunkBytes()-1)/chunkBytes())
}

func (l *lane) allocLarge(payload []byte, w alloc.Want) (Ref, error) {
	x, err := l.writeChunks(payload, w.Replicas)
	if err != nil {
		return Ref{}, err
	}
	w.Tag |= proto.TagIndex
	w.Capacity = indexRoom(max(len(payload), w.Capacity))
	ref, err := l.alloc.Alloc(x.encode(), w)
	if err != nil && !errors.Is(err, ErrUnknown) {
		l.freeRefs(x.chunks)
	}
	return ref, err
}

// writeChunks allocates the chunks of a payload.
func (l *lane) writeChunks(payload []byte, replicas int) (index, error) {
	x := index{bytes: int64(len(payload))}
	for len(payload) > 0 {
		n := min(len(payload), chunkBytes())
		ref, err := l.alloc.Alloc(payload[:n], alloc.Want{Kind: proto.Single, Replicas: replicas, Tag: proto.TagChunk})
		if err != nil {
			l.freeRefs(x.chunks)
			return index{}, err
		}
		x.chunks = append(x.chunks, ref)
		payload = payload[n:]
	}
	return x, nil
}

// freeRefs gives chunks back. Chunks that cannot be freed now are unreachable and
// carry their writer: the reachability scrub finds them.
func (l *lane) freeRefs(refs []Ref) {
	for _, r := range refs {
		_, _, _ = l.alloc.Free(r)
	}
	_ = l.alloc.Tidy()
}

func (l *lane) freeChunks(idx []byte) {
	if x, err := parseIndex(idx); err == nil {
		l.freeRefs(x.chunks)
	}
}

// readLarge assembles an object behind an index that has just been read.
func (l *lane) readLarge(ref Ref, dst, idx []byte) ([]byte, error) {
	for range maxIndexReads {
		x, err := parseIndex(idx)
		if err != nil {
			return dst, err
		}
		out, err := l.readChunks(x, dst)
		if err != errMoved {
			return out, err
		}
		again, info, err := l.slab.Read(ref, nil)
		if err != nil {
			return dst, err
		}
		if info.Tag&proto.TagIndex == 0 {
			return append(dst, again...), nil
		}
		idx = again
	}
	return dst, fmt.Errorf("%w: %v kept changing", ErrBusy, ref)
}

// readChunks appends the chunks of an index to dst. errMoved when one is gone:
// the index that was read is not the present one any more.
func (l *lane) readChunks(x index, dst []byte) ([]byte, error) {
	out, at := dst, len(dst)
	if at == 0 && cap(dst) < int(x.bytes) {
		// New memory may as well have the room in front that reading in place needs.
		out, at = make([]byte, proto.SingleLead+int(x.bytes)), proto.SingleLead
	} else {
		out = slices.Grow(dst, int(x.bytes))[:at+int(x.bytes)]
	}
	switch err := l.slab.ReadChunks(x.chunks, out, at, chunkBytes()); {
	case errors.Is(err, ErrFreed):
		return dst, errMoved
	case err != nil:
		return dst, err
	}
	return out[at-len(dst):], nil
}

// writeLarge replaces the payload of an object whose old or new payload needs
// chunks. A small payload goes back into the slab itself.
func (l *lane) writeLarge(ref Ref, payload []byte, version uint64) error {
	reg, err := l.Region(ref.Addr.Region())
	if err != nil {
		return err
	}
	if len(payload) > MaxObjectBytes {
		return fmt.Errorf("%w: %d bytes, an object holds at most %d", ErrTooLarge, len(payload), MaxObjectBytes)
	}
	// Learn the room of the slab before anything is written elsewhere.
	if _, _, err := l.slab.Read(ref, nil); err != nil {
		return err
	}
	b, _ := reg.Geometry.BlockOf(uint64(ref.Addr.Off()))
	h := reg.Headers.Load(b)
	if h.Kind() == proto.Single {
		return fmt.Errorf("%w: %v", ErrImmutable, ref)
	}
	room := h.Class().PayloadBytes(proto.Pair)
	if len(payload) > room && indexRoom(len(payload)) > room {
		return fmt.Errorf("%w: %d bytes need an index of %d, this object has room for %d", ErrTooLarge, len(payload), indexRoom(len(payload)), room)
	}
	body, tag := payload, uint32(0)
	var x index
	if len(payload) > room {
		if x, err = l.writeChunks(payload, reg.Replicas()); err != nil {
			return err
		}
		body, tag = x.encode(), proto.TagIndex
	}
	var old []byte
	_, err = l.slab.Update(ref, func(was []byte, info *slab.Info) ([]byte, error) {
		if version != anyVersion && info.Version != version {
			return nil, fmt.Errorf("%w: %d, not %d", ErrConflict, info.Version, version)
		}
		old = old[:0]
		if info.Tag&proto.TagIndex != 0 {
			old = append(old, was...)
		}
		info.Tag = info.Tag&^proto.TagIndex | tag
		return body, nil
	})
	switch {
	case err == nil:
		if len(old) > 0 {
			l.freeChunks(bytes.Clone(old))
		}
	case !errors.Is(err, ErrUnknown):
		l.freeRefs(x.chunks)
	}
	return err
}

// updateLarge is Update on an object of several slabs: f sees the whole payload,
// and the commit names the version that f saw.
func (l *lane) updateLarge(ref Ref, f func(old []byte) ([]byte, error)) error {
	for attempt := 1; attempt <= maxIndexReads; attempt++ {
		out, info, err := l.slab.Read(ref, nil)
		if err != nil {
			return err
		}
		if info.Tag&proto.TagIndex != 0 {
			x, err := parseIndex(out)
			if err != nil {
				return err
			}
			if out, err = l.readChunks(x, nil); err == errMoved {
				continue
			} else if err != nil {
				return err
			}
		}
		payload, err := f(out)
		if err != nil {
			return err
		}
		if err = l.writeLarge(ref, payload, info.Version); !errors.Is(err, ErrConflict) {
			return err
		}
		if err := l.Pause(attempt); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %v kept changing", ErrBusy, ref)
}
