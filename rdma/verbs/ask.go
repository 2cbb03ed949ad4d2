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
	// stepBytes bounds what is flushed for a request before requests of other lanes have their turn.
	stepBytes = 1 << 20
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

// tag and the following functions decode the fields of a request to flush ranges.
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

// at is a range. Preconditions: i < ranges.
func (a asked) at(i int) (off, bytes uint64) {
	b := a.b[askedBytes+rangeBytes*i:]
	return binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
}

// progress is how far a request has been carried out.
type progress struct {
	done  int    // ranges that are durable
	bytes uint64 // of the next one, from its beginning on
}

// flush has the ranges made durable, in their order, until stepBytes are, one fails, or ended has a reason to leave the rest out.
// more: it is to be called again.
func (a asked) flush(p *progress, persist func(region uint32, epoch, off, bytes uint64) error, ended func() error) (more bool, err error) {
	for left := uint64(stepBytes); p.done < a.ranges(); {
		if left == 0 {
			return true, nil
		}
		off, bytes := a.at(p.done)
		n := min(bytes-p.bytes, left)
		if err = ended(); err == nil {
			err = persist(a.region(), a.epoch(), off+p.bytes, n)
		}
		if err != nil {
			return false, err
		}
		left -= n
		if p.bytes += n; p.bytes == bytes {
			p.done, p.bytes = p.done+1, 0
		}
	}
	return false, nil
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

// unflushed returns the index of the FLUSH whose range was refused, the one with the number done of those that the node was asked
// for, and whether a verb behind it may have changed memory.
func unflushed(verbs []rdma.Verb, done int, asks func(v *rdma.Verb) bool) (at int, overtaken bool) {
	for at = range verbs {
		if asks(&verbs[at]) {
			if done == 0 {
				break
			}
			done--
		}
	}
	return at, change(verbs[at+1:])
}

// unpushed returns the index of the first FLUSH that was not carried out when the verb at an index was refused, or that index, and
// whether a verb between them may have changed memory. asked: the node is asked for them, else they are left to later ones.
func unpushed(verbs []rdma.Verb, at int, asked bool) (first int, overtaken bool) {
	for i := range at {
		if !persistent(&verbs[i]) {
			continue
		}
		step := i // which carries it out
		for rdma.LeftToLater(verbs, step) {
			step = nextPersistent(verbs, step)
		}
		if asked || step >= at {
			return i, change(verbs[i:at])
		}
	}
	return at, false
}

// persistent says whether v is a FLUSH that must survive a loss of power.
func persistent(v *rdma.Verb) bool { return v.Op == rdma.Flush && v.Kind == rdma.Persistent }

// nextPersistent is the index of the next persistent FLUSH. Preconditions: there is one.
func nextPersistent(verbs []rdma.Verb, at int) int {
	for at++; !persistent(&verbs[at]); at++ {
	}
	return at
}

// change says whether one of the verbs changes memory.
func change(verbs []rdma.Verb) bool {
	for i := range verbs {
		if op := verbs[i].Op; op != rdma.Read && op != rdma.Flush {
			return true
		}
	}
	return false
}
