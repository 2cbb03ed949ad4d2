package client

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// The payload of an index slab, in bytes:
//
//	| payload bytes:8 | chunk bytes:8 | ref:16 | ref:16 | ...
//
// All chunks but the last hold chunk bytes each.
const indexHeaderBytes = 16

// chunkClass is the size class of chunks, 256 KiB: small enough that the checksum of a chunk
// is computed, and the chunk copied, from the processor's cache; large enough that the index
// of an object of MaxObjectBytes fits a small slab.
var chunkClass, _ = proto.ClassOf(256 << 10)

// chunkBytes is the payload of every chunk but the last, of clear objects.
func chunkBytes() int { return chunkClass.PayloadBytes(proto.Single) }

// chunkBytes is the payload of every chunk but the last that the lane writes.
func (l *lane) chunkBytes() int { return chunkBytes() - l.slab.Overhead() }

// index is the list of the chunks of a large object.
type index struct {
	bytes  int64 // length of the object's payload
	chunk  int   // payload of every chunk but the last
	chunks []Ref // in the order of the payload
}

// encode is the payload of an index; decodeIndex reads it.
func (x index) encode() []byte {
	b := make([]byte, indexHeaderBytes, indexHeaderBytes+proto.RefBytes*len(x.chunks))
	proto.PutWord(b, 0, uint64(x.bytes))
	proto.PutWord(b, 8, uint64(x.chunk))
	for _, r := range x.chunks {
		b, _ = r.AppendBinary(b)
	}
	return b
}

// parseIndex decodes an index. It checks the index although the slab's checksum was right: a
// client with a defect may have written it.
func parseIndex(b []byte) (index, error) {
	if len(b) < indexHeaderBytes || (len(b)-indexHeaderBytes)%proto.RefBytes != 0 {
		return index{}, fmt.Errorf("%w: index slab of %d bytes", ErrCorrupt, len(b))
	}
	x := index{bytes: int64(proto.Word(b, 0))}
	size := int64(proto.Word(b, 8))
	for at := indexHeaderBytes; at < len(b); at += proto.RefBytes {
		x.chunks = append(x.chunks, proto.DecodeRef(b[at:]))
	}
	x.chunk = int(size)
	right := x.chunk == chunkBytes() || x.chunk == chunkBytes()-proto.EncryptionBytes
	if n := int64(len(x.chunks)); x.bytes < 0 || x.bytes > MaxObjectBytes || !right || n != (x.bytes+size-1)/size {
		return index{}, fmt.Errorf("%w: index of %d bytes in %d chunks of %d", ErrCorrupt, x.bytes, n, size)
	}
	return x, nil
}

// indexRoom is the length of the index of an object of n bytes.
func indexRoom(n, chunk int) int { return indexHeaderBytes + proto.RefBytes*((n+chunk-1)/chunk) }

// part is the index of the chunks that hold the n bytes from offset on. first is the offset
// of the first of these chunks.
func (x index) part(offset int64, n int) (first int64, part index) {
	size := int64(x.chunk)
	from := min(offset/size, int64(len(x.chunks)))
	to := min((offset+int64(n)+size-1)/size, int64(len(x.chunks)))
	to = max(to, from)
	return from * size, index{bytes: max(0, min(x.bytes, to*size)-from*size), chunk: x.chunk, chunks: x.chunks[from:to]}
}
