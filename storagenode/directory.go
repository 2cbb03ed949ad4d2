package storagenode

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/storagenode/state"
	"github.com/zeebo/xxh3"
)

// directory is what the beginning of a device says: which regions lie where, and the node's state. It is two
// images, of which a change overwrites the older one, and a word that names the newest:
//
//	0                     commit: sequence number of the newest image << 16 | low 16 bits of its hash
//	4096                  image with even sequence numbers
//	4096 + imageBytes     image with odd ones
//
//	image   0 magic  8 version  16 sequence  24 bytes of the device  32 bytes of state  40 extents  48 checksum of all
//	        64 extents: region:8 offset:8 bytes:8 ...  then the state
//
// Linearizes at: the store of the commit word, of 8 bytes, which is untorn. A change is: the older image, flush, the commit word,
// flush. A loss of power before that store leaves the newest image as it was; the one being written may be torn.
//
// Invariant: the image that the commit word names is whole. If its checksum is wrong, the medium is damaged: no loss of
// power leaves that. Opening the device is then an error; the older image is not used in its place.
type directory struct {
	mem   []byte       // of directoryBytes
	flush pmem.Flusher // makes ranges of mem persistent
	bytes uint64       // of the device

	sequence uint64   // of the newest image
	extents  []extent // in order of their offsets
	kept     []byte   // state.Kept, encoded; empty for a node that has none
}

// extent is where a region lies.
type extent struct {
	region     uint32 // number in the table
	off, bytes uint64 // multiples of the device's alignment
}

const (
	directoryVersion = 1
	commitBytes      = 4096
	imageHead        = 64
	extentBytes      = 24
	imageBytes       = (imageHead + extentBytes*state.MaxRegions + state.MaxKeptBytes + 4095) &^ 4095
	directoryBytes   = commitBytes + 2*imageBytes
)

var directoryMagic = [8]byte{'Q', 'U', 'A', 'R', 'R', 'Y', 'D', 'X'}

// errNoDirectory: the device was never formatted.
var errNoDirectory = errors.New("holds no directory of a storage node")

// firstSequence is that of an empty directory without a state.
const firstSequence = 2

// commitWord is the word that names the image of a sequence number.
func commitWord(sequence uint64) uint64 {
	var b [8]byte
	proto.PutWord(b[:], 0, sequence)
	return sequence<<16 | xxh3.Hash(b[:])&0xffff
}

// image is the place of the image with a sequence number.
func (d *directory) image(sequence uint64) []byte {
	at := commitBytes + sequence%2*imageBytes
	return d.mem[at : at+imageBytes]
}

// read takes the newest image. errNoDirectory if the area is all zero, or holds nothing of this kind.
func (d *directory) read() error {
	commit := proto.Word(d.mem, 0)
	d.sequence = commit >> 16
	if commit != commitWord(d.sequence) || commit == 0 {
		// The first change after a format writes the odd image. If the commit word is 0 and the odd image has no
		// magic, no change was ever acknowledged: the format was cut short.
		if [8]byte(d.image(1)) == directoryMagic || commit != 0 && [8]byte(d.image(0)) == directoryMagic {
			return errors.New("the directory at its start is damaged (its commit word)")
		}
		return errNoDirectory
	}
	b := d.image(d.sequence)
	if [8]byte(b) != directoryMagic {
		if [8]byte(d.image(d.sequence+1)) != directoryMagic {
			return errNoDirectory // a word that looks like one of ours
		}
		return errors.New("the directory at its start is damaged")
	}
	if v := proto.Word(b, 8); v != directoryVersion {
		return fmt.Errorf("the directory at its start has version %d, this build reads %d", v, directoryVersion)
	}
	kept, extents := proto.Word(b, 32), proto.Word(b, 40)
	if kept > state.MaxKeptBytes || extents > state.MaxRegions {
		return fmt.Errorf("the directory at its start is damaged: %d regions, %d bytes of state", extents, kept)
	}
	n := imageHead + extents*extentBytes + kept
	if proto.Word(b, 16) != d.sequence || proto.Word(b, 48) != imageSum(b[:n]) {
		return errors.New("the directory at its start is damaged (its checksum)")
	}
	if had := proto.Word(b, 24); had != d.bytes {
		return fmt.Errorf("the directory at its start is of a device of %d bytes, and this one has %d for the directory and regions: the namespace was resized, or --shared was given for one and not for the other", had, d.bytes)
	}
	d.extents = nil
	for i := range extents {
		at := int(imageHead + i*extentBytes)
		d.extents = append(d.extents, extent{uint32(proto.Word(b, at)), proto.Word(b, at+8), proto.Word(b, at+16)})
	}
	d.kept = slices.Clone(b[n-kept : n])
	return d.check()
}

// imageSum is the checksum of an image with its own place left out.
func imageSum(b []byte) uint64 {
	return xxh3.HashSeed(b[imageHead:], xxh3.Hash(b[:48]))
}

// check refuses extents that no directory of this node has.
func (d *directory) check() error {
	end := uint64(directoryBytes)
	seen := map[uint32]bool{}
	for _, e := range d.extents {
		if e.off < end || e.bytes == 0 || e.off > d.bytes || e.bytes > d.bytes-e.off || e.region == 0 || seen[e.region] {
			return fmt.Errorf("the directory at its start is damaged: region %d at %d, %d bytes", e.region, e.off, e.bytes)
		}
		end, seen[e.region] = e.off+e.bytes, true
	}
	return nil
}

// write makes the directory's new contents durable.
func (d *directory) write(extents []extent, kept []byte) error {
	if len(kept) > state.MaxKeptBytes || len(extents) > state.MaxRegions {
		return fmt.Errorf("directory of %d regions and %d bytes of state: want at most %d and %d", len(extents), len(kept), state.MaxRegions, state.MaxKeptBytes)
	}
	next := d.sequence + 1
	b := d.image(next)
	n := imageHead + len(extents)*extentBytes + len(kept)
	clear(b[:imageHead])
	copy(b, directoryMagic[:])
	for at, w := range map[int]uint64{8: directoryVersion, 16: next, 24: d.bytes, 32: uint64(len(kept)), 40: uint64(len(extents))} {
		proto.PutWord(b, at, w)
	}
	for i, e := range extents {
		at := imageHead + i*extentBytes
		proto.PutWord(b, at, uint64(e.region))
		proto.PutWord(b, at+8, e.off)
		proto.PutWord(b, at+16, e.bytes)
	}
	copy(b[n-len(kept):], kept)
	proto.PutWord(b, 48, imageSum(b[:n]))
	off := commitBytes + next%2*imageBytes
	if err := d.persist(off, uint64(n)); err != nil {
		return fmt.Errorf("directory of the device: %w", err)
	}
	d.commit(commitWord(next))
	if err := d.persist(0, 8); err != nil {
		return fmt.Errorf("directory of the device: %w", err)
	}
	d.sequence, d.extents, d.kept = next, extents, kept
	return nil
}

// format makes an empty directory.
func (d *directory) format() error {
	d.commit(0)
	if err := d.persist(0, 8); err != nil {
		return err
	}
	d.sequence = firstSequence - 1
	return d.write(nil, nil)
}

// persist makes a range durable where the medium is.
func (d *directory) persist(off, n uint64) error {
	if !d.flush.Persistent() {
		return nil
	}
	return d.flush.Persist(d.mem, off, n)
}

// inOrder sorts extents by their offsets.
func inOrder(extents []extent) []extent {
	slices.SortFunc(extents, func(a, b extent) int { return cmp.Compare(a.off, b.off) })
	return extents
}

// gap finds room of some bytes on a device between from, where regions may begin, and end: the first there is.
// taken is in order.
func gap(taken []extent, from, end, bytes uint64) (uint64, error) {
	at := from
	for _, e := range taken {
		if e.off >= at && e.off-at >= bytes {
			return at, nil
		}
		at = max(at, e.off+e.bytes)
	}
	if at <= end && end-at >= bytes {
		return at, nil
	}
	return 0, fmt.Errorf("%w: no %d bytes in one piece are free on the device", host.ErrNoSpace, bytes)
}

// free is how much between from and end no region takes.
func free(taken []extent, from, end uint64) uint64 {
	n := end - min(end, from)
	for _, e := range taken {
		n -= min(n, e.bytes)
	}
	return n
}
