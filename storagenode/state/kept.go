package state

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/zeebo/xxh3"
)

// KeptVersion changes with any change of the form below.
const KeptVersion = 1

// MaxKeptBytes bounds what DecodeKept looks at.
const MaxKeptBytes = keptHeadBytes + 8*2*MaxSerials + 8

// The form of a Kept on disk, all little endian:
//
//	0 magic  8 version  16 cluster uuid  32 term  40 next  48 live count  56 ended count
//	64 live serials  ... ended serials  ... checksum of all before
const keptHeadBytes = 64

var keptMagic = [8]byte{'Q', 'U', 'A', 'R', 'R', 'Y', 'N', 'D'}

// ErrNotKept: the bytes are not what a node has kept.
var ErrNotKept = errors.New("not the state of a quarry node")

// Encode returns the encoded form with its checksum.
func (k *Kept) Encode() []byte {
	n := keptHeadBytes + 8*(len(k.Serials.Live)+len(k.Serials.Ended))
	b := make([]byte, n+8)
	copy(b, keptMagic[:])
	proto.PutWord(b, 8, KeptVersion)
	copy(b[16:], k.Cluster[:])
	proto.PutWord(b, 32, k.Term)
	proto.PutWord(b, 40, k.Serials.Next)
	proto.PutWord(b, 48, uint64(len(k.Serials.Live)))
	proto.PutWord(b, 56, uint64(len(k.Serials.Ended)))
	at := keptHeadBytes
	for _, list := range [][]uint64{k.Serials.Live, k.Serials.Ended} {
		for _, serial := range list {
			proto.PutWord(b, at, serial)
			at += 8
		}
	}
	proto.PutWord(b, n, xxh3.Hash(b[:n]))
	return b
}

// DecodeKept reads and checks what Encode has written.
func DecodeKept(b []byte) (Kept, error) {
	var k Kept
	n := len(b) - 8
	if n < keptHeadBytes || len(b) > MaxKeptBytes || len(b)%8 != 0 {
		return k, fmt.Errorf("%w: %d bytes", ErrNotKept, len(b))
	}
	if [8]byte(b[:8]) != keptMagic {
		return k, fmt.Errorf("%w: wrong magic %x", ErrNotKept, b[:8])
	}
	if v := proto.Word(b, 8); v != KeptVersion {
		return k, fmt.Errorf("%w: version %d, this build reads %d", ErrNotKept, v, KeptVersion)
	}
	if xxh3.Hash(b[:n]) != proto.Word(b, n) {
		return k, fmt.Errorf("%w: its checksum is wrong", ErrNotKept)
	}
	live, ended := proto.Word(b, 48), proto.Word(b, 56)
	if words := uint64(n-keptHeadBytes) / 8; live > words || ended != words-live {
		return k, fmt.Errorf("%w: %d live and %d ended sessions in %d bytes", ErrNotKept, live, ended, len(b))
	}
	k.Cluster, k.Term, k.Serials.Next = [16]byte(b[16:32]), proto.Word(b, 32), proto.Word(b, 40)
	at := keptHeadBytes
	read := func(count uint64) []uint64 {
		list := make([]uint64, count)
		for i := range list {
			list[i] = proto.Word(b, at)
			at += 8
		}
		return list
	}
	k.Serials.Live, k.Serials.Ended = read(live), read(ended)
	if !k.Serials.valid() {
		return Kept{}, fmt.Errorf("%w: its lists of sessions are not in order", ErrNotKept)
	}
	return k, nil
}

// valid says whether the invariants of the lists hold.
func (s *Serials) valid() bool {
	strictly := func(list []uint64) bool {
		for i := 1; i < len(list); i++ {
			if list[i-1] >= list[i] {
				return false
			}
		}
		return true
	}
	live, ended := s.Live, s.Ended
	return strictly(live) && strictly(ended) &&
		(len(live) == 0 || live[0] > 0 && slices.Max(live) < s.Next) &&
		(len(ended) == 0 || ended[0] > 0 && ended[0] >= s.Next)
}
