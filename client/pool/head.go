package pool

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
)

// HeaderBytes is the length of a local part's header, behind which its memory begins.
const HeaderBytes = 4096

// partMagic begins a header.
const partMagic = 0x315452504f5152 // "RQOPRT1"

// partState is the state of a local part.
type partState uint64

const (
	partMaking partState = iota + 1 // Create has not returned: what it holds does not count
	partOpen                        // it holds what was persisted; replicas may lack some of it
	partClosed                      // every replica had what was persisted when it was closed
	partTorn                        // of a mirror: a Sync of it has not returned, or a Persist has failed there
)

// partHead is the state of a local part, little endian.
//
// Invariant: an ownership of a replica under a token other than Token and Next is not this part's.
type partHead struct {
	Magic    uint64
	Sequence uint64 // one more with each change
	Bytes    uint64 // of the memory
	Set      [16]byte
	State    partState
	Token    token // of the last ownership whose Open has returned
	Next     token // of an Open that has not returned; zero: none
	File     fileID
	Boot     [16]byte // of the machine's start that the file is trusted in, because a loss of power may take what was flushed, or a flush has failed; zero: in all
}

// fileID tells a file from its copies, also from those that are made in its place.
type fileID struct{ Inode, Born uint64 }

// token names an ownership of replicas by a local part.
type token [16]byte

func tokenOf(s string) (t token) { copy(t[:], s); return t }

func (t token) String() string { return string(bytes.TrimRight(t[:], "\x00")) }

// slotBytes is where the second copy of the state lies in a header. A change writes the older copy, so that a loss of power in the middle leaves the other.
const slotBytes = HeaderBytes / 2

// encode is the state with a hash behind it.
func (h partHead) encode() []byte {
	b, err := binary.Append(nil, binary.LittleEndian, h)
	if err != nil {
		panic(err) // of fixed size
	}
	return binary.LittleEndian.AppendUint64(b, rdma.Hash(b, 0))
}

// slot is where the state lies in its header.
func (h partHead) slot() int { return int(h.Sequence % 2 * slotBytes) }

// errNoHead: a header is all zero. A file is so between its making and the first header.
var errNoHead = errors.New("no header")

// decodePartHead reads the newer state of a header.
func decodePartHead(b []byte) (h partHead, err error) {
	n := binary.Size(h)
	empty := true
	for at := 0; at < HeaderBytes; at += slotBytes {
		var s partHead
		slot := b[at : at+n+8]
		for _, c := range slot {
			empty = empty && c == 0
		}
		if _, err := binary.Decode(slot, binary.LittleEndian, &s); err != nil {
			return h, err
		}
		if s.Magic != partMagic || s.State < partMaking || s.State > partTorn || s.slot() != at || binary.LittleEndian.Uint64(slot[n:]) != rdma.Hash(slot[:n], 0) {
			continue
		}
		if s.Sequence > h.Sequence || h.Magic == 0 {
			h = s
		}
	}
	switch {
	case h.Magic != 0:
		return h, nil
	case empty:
		return h, errNoHead
	}
	return h, fmt.Errorf("%w: its header is damaged, or of another program", ErrNotPart)
}
