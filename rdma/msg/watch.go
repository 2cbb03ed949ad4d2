package msg

import (
	"encoding/binary"
	"fmt"
)

// Watch is the procedure by which a client has the node look at words of regions, and learns which have changed. Its
// requests begin with the operation and the number of the set, which the client draws.
//
//	watch  1 | set 8 | id 4, region 4, epoch 8, offset 8, seen 8 | ...    tell when the word at offset is not seen
//	drop   2 | set 8 | id 4 | ...                                         forget words
//	wait   3 | set 8 | ms 4                                               answered when words have changed, or after ms
//
//	answer of wait: id 4, word 8 | ...                                    what the words were when they were looked at
//
// The answer has the latest value of a changed word; the node then compares with that value. WatchGone means that the word is not
// watched any more, because the node does not serve the region under the epoch. An id that is watched again replaces the one
// before. A request that is refused changes nothing.
const Watch = 9

const (
	watchHead = 9
	wordBytes = 32
	toldBytes = 12

	// MaxWatchWords and MaxWatchDrops are how many one message takes, MaxWatchTold what one answer tells.
	MaxWatchWords = (MaxPayload - watchHead) / wordBytes
	MaxWatchDrops = (MaxPayload - watchHead) / 4
	MaxWatchTold  = MaxPayload / toldBytes

	// WatchGone means that the word is not watched any more; no slab word has this value.
	WatchGone = ^uint64(0)
)

// WatchOp is an operation of Watch.
type WatchOp uint8

// Operations of Watch.
const (
	WatchAdd  WatchOp = 1
	WatchDrop WatchOp = 2
	WatchWait WatchOp = 3
)

// WatchWord is a word to look at.
type WatchWord struct {
	ID     uint32 // by which answers name it; of the client's choice, within the set
	Region uint32
	Epoch  uint64 // of the region
	Off    uint64 // in the region, a multiple of 8
	Seen   uint64 // what the client knows of the word
}

// WatchHead appends the beginning of a request to the set.
func WatchHead(b []byte, op WatchOp, set uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, byte(op)), set)
}

// Append appends the word to a request WatchAdd.
func (w *WatchWord) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, w.ID)
	b = binary.LittleEndian.AppendUint32(b, w.Region)
	b = binary.LittleEndian.AppendUint64(b, w.Epoch)
	b = binary.LittleEndian.AppendUint64(b, w.Off)
	return binary.LittleEndian.AppendUint64(b, w.Seen)
}

// ParseWatch takes a request apart: its rest is read by WatchWords, or as numbers of 4 bytes.
func ParseWatch(b []byte) (op WatchOp, set uint64, rest []byte, err error) {
	if len(b) < watchHead {
		return 0, 0, nil, fmt.Errorf("%w: a watch of %d bytes", errFormat, len(b))
	}
	op, set, rest = WatchOp(b[0]), binary.LittleEndian.Uint64(b[1:]), b[watchHead:]
	ok := false
	switch op {
	case WatchAdd:
		ok = len(rest)%wordBytes == 0
	case WatchDrop:
		ok = len(rest)%4 == 0
	case WatchWait:
		ok = len(rest) == 4
	}
	if !ok {
		err = fmt.Errorf("%w: operation %d of a watch with %d bytes", errFormat, op, len(rest))
	}
	return op, set, rest, err
}

// WatchWords calls fn with the words of a request WatchAdd until it returns an error.
func WatchWords(rest []byte, fn func(w WatchWord) error) error {
	for ; len(rest) >= wordBytes; rest = rest[wordBytes:] {
		if err := fn(WatchWord{
			ID: binary.LittleEndian.Uint32(rest), Region: binary.LittleEndian.Uint32(rest[4:]), Epoch: binary.LittleEndian.Uint64(rest[8:]),
			Off: binary.LittleEndian.Uint64(rest[16:]), Seen: binary.LittleEndian.Uint64(rest[24:]),
		}); err != nil {
			return err
		}
	}
	return nil
}

// PutWatchTold writes entry i of an answer to a wait, and returns the length of the answer up to it.
func PutWatchTold(b []byte, i int, id uint32, word uint64) int {
	binary.LittleEndian.PutUint32(b[i*toldBytes:], id)
	binary.LittleEndian.PutUint64(b[i*toldBytes+4:], word)
	return (i + 1) * toldBytes
}

// WatchTold calls fn with the entries of an answer to a wait.
func WatchTold(b []byte, fn func(id uint32, word uint64)) {
	for ; len(b) >= toldBytes; b = b[toldBytes:] {
		fn(binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint64(b[4:]))
	}
}
