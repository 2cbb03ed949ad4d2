//lint:file-ignore U1000 what nodes are asked to do is used with the tag verbs only

package verbs

import (
	"encoding/binary"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// What queue pairs carry where a node is asked to flush ranges, or to hash them: a SEND of the client behind its WRITEs, and one of
// the node. Fields are little endian.
//
//	client  asked     0 tag  4 ranges  8 region  12 task  16 epoch  24 offset and bytes (16) of each range, and the seed (24) of one to hash
//	node    answered  0 tag  4 code    8 ranges done  12 zero  16 hash (8) of each range, if hashes were asked for
const (
	askedBytes    = 24
	rangeBytes    = 16
	maxRanges     = 128
	maxAsked      = askedBytes + maxRanges*rangeBytes
	answeredBytes = 16
	// stepBytes bounds what is done for a request before requests of other lanes have their turn. No range to hash is longer.
	stepBytes = 1 << 20

	seededBytes = rangeBytes + 8 // of a range to hash
	hashBytes   = 8
	maxHashes   = 64

	// Both lie in one page of each end.
	notesBytes  = 4096
	maxAnswered = answeredBytes + maxHashes*hashBytes
	answeredAt  = notesBytes - maxAnswered
)

// task is what a client asks a node to do with ranges.
type task uint32

const (
	taskFlush task = 0
	taskHash  task = 1 // of nodes whose answers have flagVerifies
)

// asked is what a client asks for: b, one of this package's pages, has its encoded form.
type asked struct{ b []byte }

// start empties it.
func (a asked) start(tag uint32, what task, region uint32, epoch uint64) {
	binary.LittleEndian.PutUint32(a.b, tag)
	binary.LittleEndian.PutUint32(a.b[4:], 0)
	binary.LittleEndian.PutUint32(a.b[8:], region)
	binary.LittleEndian.PutUint32(a.b[12:], uint32(what))
	binary.LittleEndian.PutUint64(a.b[16:], epoch)
}

// add appends a range. Preconditions: there is room.
func (a asked) add(off, bytes, seed uint64) {
	at := a.len()
	binary.LittleEndian.PutUint64(a.b[at:], off)
	binary.LittleEndian.PutUint64(a.b[at+8:], bytes)
	if a.task() == taskHash {
		binary.LittleEndian.PutUint64(a.b[at+rangeBytes:], seed)
	}
	binary.LittleEndian.PutUint32(a.b[4:], uint32(a.ranges()+1))
}

// tag and the following functions decode the fields of a request.
func (a asked) tag() uint32    { return binary.LittleEndian.Uint32(a.b) }
func (a asked) ranges() int    { return int(binary.LittleEndian.Uint32(a.b[4:])) }
func (a asked) region() uint32 { return binary.LittleEndian.Uint32(a.b[8:]) }
func (a asked) task() task     { return task(binary.LittleEndian.Uint32(a.b[12:])) }
func (a asked) epoch() uint64  { return binary.LittleEndian.Uint64(a.b[16:]) }
func (a asked) len() int       { return askedBytes + a.task().rangeBytes()*a.ranges() }

// room says whether another range can be added.
func (a asked) room() bool { return a.ranges() < a.task().maxRanges() }

// rangeBytes is how long a range is in a request.
func (t task) rangeBytes() int {
	if t == taskHash {
		return seededBytes
	}
	return rangeBytes
}

// maxRanges is how many ranges a request has at most.
func (t task) maxRanges() int {
	if t == taskHash {
		return maxHashes
	}
	return maxRanges
}

// decodeAsked reads a message, all of b. Ranges to hash are within the bounds of a chain.
func decodeAsked(b []byte) (asked, error) {
	a := asked{b}
	if len(b) < askedBytes || len(b) > maxAsked {
		return a, errPeer
	}
	if n := a.ranges(); a.task() > taskHash || n < 1 || n > a.task().maxRanges() || len(b) != a.len() {
		return a, errPeer
	}
	for i, left := 0, uint64(rdma.MaxChainBytes); a.task() == taskHash && i < a.ranges(); i++ {
		_, bytes := a.at(i)
		if bytes > min(left, rdma.MaxVerbBytes) {
			return a, errPeer
		}
		left -= bytes
	}
	return a, nil
}

// at is a range. Preconditions: i < ranges.
func (a asked) at(i int) (off, bytes uint64) {
	b := a.b[askedBytes+a.task().rangeBytes()*i:]
	return binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
}

// seed is that of a range to hash. Preconditions: i < ranges.
func (a asked) seed(i int) uint64 {
	return binary.LittleEndian.Uint64(a.b[askedBytes+seededBytes*i+rangeBytes:])
}

// progress is how far a request has been carried out.
type progress struct {
	done   int               // ranges that are durable, or hashed
	bytes  uint64            // of the next one, from its beginning on
	hashes [maxHashes]uint64 // of those that were hashed
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

// hash has the ranges hashed, in their order, until the next one would go beyond stepBytes, one fails, or ended has a reason to leave
// the rest out. more: it is to be called again.
// Preconditions: no range is longer than stepBytes.
func (a asked) hash(p *progress, hash func(region uint32, epoch, off, bytes, seed uint64) (uint64, error), ended func() error) (more bool, err error) {
	for left := uint64(stepBytes); p.done < a.ranges(); p.done++ {
		off, bytes := a.at(p.done)
		if bytes > left {
			return true, nil
		}
		if err = ended(); err == nil {
			p.hashes[p.done], err = hash(a.region(), a.epoch(), off, bytes, a.seed(p.done))
		}
		if err != nil {
			return false, err
		}
		left -= bytes
	}
	return false, nil
}

// answered is a node's answer.
type answered struct {
	tag  uint32 // of the message
	err  error  // why the range after done was left out: one of rdma.Refusals, or rdma.ErrBroken
	done int    // ranges that are durable, or hashed
}

// hashes is how many hashes the answer to a request has.
func (a asked) hashes() int {
	if a.task() == taskHash {
		return a.ranges()
	}
	return 0
}

// answerBytes is how long the answer to a request is.
func (a asked) answerBytes() int { return answeredBytes + hashBytes*a.hashes() }

// put encodes the answer. Preconditions: len(b) >= maxAnswered.
func (f *answered) put(b []byte, hashes []uint64) {
	binary.LittleEndian.PutUint32(b, f.tag)
	binary.LittleEndian.PutUint32(b[4:], uint32(host.Code(f.err)))
	binary.LittleEndian.PutUint32(b[8:], uint32(f.done))
	binary.LittleEndian.PutUint32(b[12:], 0)
	for i, h := range hashes {
		binary.LittleEndian.PutUint64(b[answeredBytes+hashBytes*i:], h)
	}
}

// hashIn is a hash of an answer.
func hashIn(b []byte, i int) uint64 {
	return binary.LittleEndian.Uint64(b[answeredBytes+hashBytes*i:])
}

// decodeAnswered reads the answer to a. An answer that does not fit it is none.
func decodeAnswered(b []byte, a asked) (answered, error) {
	f := answered{tag: binary.LittleEndian.Uint32(b), err: host.CodeError(byte(min(binary.LittleEndian.Uint32(b[4:]), 255))), done: int(binary.LittleEndian.Uint32(b[8:]))}
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
		if op := verbs[i].Op; op != rdma.Read && op != rdma.Flush && op != rdma.Verify {
			return true
		}
	}
	return false
}
