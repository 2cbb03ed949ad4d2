package pool

import (
	"encoding/binary"
	"fmt"
)

// Attr are the attributes of a pool. Their meaning is the program's; the fields are those of librpmem's rpmem_pool_attr, of the same sizes.
type Attr struct {
	Signature   [8]byte // of the kind of pool
	Major       uint32  // version of its format
	Compat      uint32  // feature bits that readers may ignore
	Incompat    uint32  // feature bits that readers must know
	ROCompat    uint32  // feature bits that writers must know
	PoolsetUUID [16]byte
	UUID        [16]byte
	NextUUID    [16]byte
	PrevUUID    [16]byte
	UserFlags   [16]byte
}

// magic begins the object of a pool's name.
const magic = 0x314c4f4f505152 // "RQPOOL1"

// head is the object of a pool's name, little endian.
type head struct {
	Magic uint64
	Bytes uint64 // of the pool
	Attr  Attr
}

func (h head) encode() []byte {
	b, err := binary.Append(nil, binary.LittleEndian, h)
	if err != nil {
		panic(err) // of fixed size
	}
	return b
}

// decodeHead reads the object of a pool's name.
func decodeHead(b []byte) (h head, err error) {
	if n, err := binary.Decode(b, binary.LittleEndian, &h); err != nil || n != len(b) || h.Magic != magic {
		return head{}, fmt.Errorf("%w: its header of %d bytes is not one of this version", ErrNotPool, len(b))
	}
	return h, nil
}
