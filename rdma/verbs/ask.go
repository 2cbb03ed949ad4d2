//lint:file-ignore U1000 what asks nodes to flush is used with the tag verbs only

package verbs

import (
	"encoding/binary"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// What queue pairs carry where a node is asked to flush: a SEND of the client behind its WRITEs, and one of the node. Fields
// are little endian.
//
//	client  asked    0 tag  4 ranges  8 region  12 zero  16 epoch  24 offset and bytes (16) of each range
//	node    flushed  0 tag  4 code    8 ranges flushed  12 zero
const (
	askedBytes   = 24
	rangeBytes   = 16
	maxRanges    = 128
	maxAsked     = askedBytes + maxRanges*rangeBytes
	flushedBytes = 16
	// Both lie in one page of each end.
	notesBytes = 4096
	flushedAt  = notesBytes - flushedBytes
)

// asked is what a client asks for: b, one of this package's pages, has its encoded form.
type asked struct{ b []byte }

// start empties it.
func (a asked) start(tag, region uint32, epoch uint64) {
	binary.LittleEndian.PutUint32(a.b, tag)
	binary.LittleEndian.PutUint32(a.b[4:], 0)
	binary.LittleEndian.PutUint32(a.b[8:], region)
	binary.LittleEndian.PutUint32(a.b[12:], 0)
	binary.LittleEndian.PutUint64(a.b[16:], epoch)
}

// add appends a range. Preconditions: there are less than maxRanges.
func (a asked) add(off, bytes uint64) {
	at := a.len()
	binary.LittleEndian.PutUint64(a.b[at:], off)
	binary.LittleEndian.PutUint64(a.b[at+8:], bytes)
	binary.LittleEndian.PutUint32(a.b[4:], uint32(a.ranges()+1))
}

func (a asked) tag() uint32    { return binary.LittleEndian.Uint32(a.b) }
func (a asked) ranges() int    { return int(binary.LittleEndian.Uint32(a.b[4:])) }
func (a asked) region() uint32 { return binary.LittleEndian.Uint32(a.b[8:]) }
func (a asked) epoch() uint64  { return binary.LittleEndian.Uint64(a.b[16:]) }
func (a asked) len() int       { return askedBytes + rangeBytes*a.ranges() }

// decodeAsked reads a message, all of b.
func decodeAsked(b []byte) (asked, error) {
	a := asked{b}
	if len(b) < askedBytes || len(b) > maxAsked {
		return a, errPeer
	}
	if n := a.ranges(); n < 1 || n > maxRanges || len(b) != a.len() || binary.LittleEndian.Uint32(b[12:]) != 0 {
		return a, errPeer
	}
	return a, nil
}

// flush has the ranges made durable, in their order, until one fails or ended has a reason to leave the rest out. It returns
// how many are durable.
func (a asked) flush(persist func(region uint32, epoch, off, bytes uint64) error, ended func() error) (done int, err error) {
	for done < a.ranges() {
		at := askedBytes + rangeBytes*done
		if err = ended(); err == nil {
			err = persist(a.region(), a.epoch(), binary.LittleEndian.Uint64(a.b[at:]), binary.LittleEndian.Uint64(a.b[at+8:]))
		}
		if err != nil {
			return done, err
		}
		done++
	}
	return done, nil
}

// flushed is a node's answer.
type flushed struct {
	tag  uint32 // of the message
	err  error  // why the range after done was not flushed: one of rdma.Refusals, or rdma.ErrBroken
	done int    // ranges that are durable
}

// put encodes the answer. Preconditions: len(b) >= flushedBytes.
func (f *flushed) put(b []byte) {
	binary.LittleEndian.PutUint32(b, f.tag)
	binary.LittleEndian.PutUint32(b[4:], uint32(host.Code(f.err)))
	binary.LittleEndian.PutUint32(b[8:], uint32(f.done))
	binary.LittleEndian.PutUint32(b[12:], 0)
}

// decodeFlushed reads the answer to a. An answer that does not fit it is none.
func decodeFlushed(b []byte, a asked) (flushed, error) {
	f := flushed{tag: binary.LittleEndian.Uint32(b), err: host.CodeError(byte(min(binary.LittleEndian.Uint32(b[4:]), 255))), done: int(binary.LittleEndian.Uint32(b[8:]))}
	if f.tag != a.tag() || f.done > a.ranges() || (f.err == nil) != (f.done == a.ranges()) {
		return f, errPeer
	}
	return f, nil
}

// unflushed is what a chain's verbs come to of which the range numbered done was refused: the verb of that range, and whether one
// behind it that changes memory has been executed.
func unflushed(verbs []rdma.Verb, done int) (at int, overtaken bool) {
	for at = range verbs {
		if v := &verbs[at]; v.Op == rdma.Flush && v.Kind == rdma.Persistent {
			if done == 0 {
				break
			}
			done--
		}
	}
	for i := at + 1; i < len(verbs); i++ {
		if op := verbs[i].Op; op != rdma.Read && op != rdma.Flush {
			return at, true
		}
	}
	return at, false
}
