package proto

import "fmt"

const (
	// DefaultRegionBytes is 2 GiB, US 2017/0149890 [0047].
	DefaultRegionBytes = 2 << 30
	// MinRegionBytes leaves room for metadata and a few blocks.
	MinRegionBytes = 16 << 20
	// MaxRegionBytes keeps every offset within Addr's 32 bits.
	MaxRegionBytes = 2 << 30

	// BlockBytes is the size of a block, and so of the largest slab.
	BlockBytes = 1 << 20
	// MapBytes is the size of a block's free-slab map: one bit for each slab of the smallest class.
	MapBytes = BlockBytes / MinSlabBytes / 8

	headersOff = RegionHeaderBytes
)

// Geometry says where the headers, maps and blocks of a region lie. Offsets are in bytes from the
// start of the region. It follows from the size alone.
type Geometry struct {
	RegionBytes uint64 // whole MiB
	Blocks      uint32 // as many as fit beside their headers and maps
	mapsOff     uint64 // of the first map; aligned to MapBytes
	dataOff     uint64 // of the first block; aligned to BlockBytes
}

// NewGeometry computes the layout of a region. The size is a whole number of MiB
// between MinRegionBytes and MaxRegionBytes.
func NewGeometry(regionBytes uint64) (Geometry, error) {
	if regionBytes < MinRegionBytes || regionBytes > MaxRegionBytes || regionBytes%BlockBytes != 0 {
		return Geometry{}, fmt.Errorf("region size %d: want a multiple of 1 MiB between 16 MiB and 2 GiB", regionBytes)
	}
	// Metadata of n blocks is 4 KiB + 2056 n; give it whole MiBs so that blocks are aligned.
	n := regionBytes / BlockBytes
	for {
		meta := headersOff + n*(8+MapBytes)
		meta = (meta + BlockBytes - 1) &^ (BlockBytes - 1)
		if meta+n*BlockBytes <= regionBytes {
			mapsOff := (headersOff + n*8 + MapBytes - 1) &^ (MapBytes - 1)
			return Geometry{RegionBytes: regionBytes, Blocks: uint32(n), mapsOff: mapsOff, dataOff: regionBytes - n*BlockBytes}, nil
		}
		n--
	}
}

// HeaderOff is the offset of a block's header word.
func (g *Geometry) HeaderOff(block uint32) uint64 { return headersOff + 8*uint64(block) }

// MapOff is the offset of a block's free-slab map.
func (g *Geometry) MapOff(block uint32) uint64 { return g.mapsOff + MapBytes*uint64(block) }

// DataOff is the offset of the first block.
func (g *Geometry) DataOff() uint64 { return g.dataOff }

// BlockOff is the offset of a block.
func (g *Geometry) BlockOff(block uint32) uint64 { return g.dataOff + BlockBytes*uint64(block) }

// StagingBlock is the last block. In a region with one replica it holds no objects: its slabs, STAGED ones
// of MaxStagedClass, are shadows for updates that find no other slab (docs/LAYOUT2.md).
func (g *Geometry) StagingBlock() uint32 { return g.Blocks - 1 }

// ShadowBlock is the last block but one. In a region with one replica it holds no objects either: lanes claim its
// slabs for shadows alone, and keep the claims (docs/LAYOUT2.md).
func (g *Geometry) ShadowBlock() uint32 { return g.Blocks - 2 }

// BlockOf is the block that an offset lies in; false for metadata and beyond the end.
func (g *Geometry) BlockOf(off uint64) (uint32, bool) {
	if off < g.dataOff || off >= g.RegionBytes {
		return 0, false
	}
	return uint32((off - g.dataOff) / BlockBytes), true
}

// Slab is slab number i of a block.
func (g *Geometry) Slab(block uint32, i int, h Header) Slab {
	return Slab{Off: g.BlockOff(block) + uint64(i*h.Class().Bytes()), Class: h.Class(), Kind: h.Kind()}
}

// SlabIndex is the number of the slab in its block; false unless off is the start of a slab
// of the class.
// Preconditions: off lies in a block.
func (g *Geometry) SlabIndex(off uint64, c Class) (int, bool) {
	in := int((off - g.dataOff) % BlockBytes)
	i := c.SlabOf(in)
	return i, in == i*c.Bytes() && i < c.Slabs()
}
