package storagenode

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"github.com/quarrystore/quarry/proto"
)

// commit stores the commit word, little-endian, in one piece: a loss of power between the bytes of a plain store, which
// a compiler may divide, would leave a word that no image has.
// Preconditions: the area begins at a multiple of 8, as mappings do.
func (d *directory) commit(w uint64) {
	var b [8]byte
	proto.PutWord(b[:], 0, w)
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&d.mem[0])), binary.NativeEndian.Uint64(b[:]))
}
