//lint:file-ignore U1000 what nodes execute for clients is used with the tag verbs only

package verbs

import (
	"encoding/binary"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// What queue pairs carry where a node's processors execute the chains that have an atomic: a SEND of the client, behind the verbs
// that are too long for it, and one of the node. The forms of verbs and results are those of package host.
//
//	client  asked     0 tag  4 verbs  8 slot  12 task=2  16 key  24 verbs, then the bytes of their WRITEs
//	node    answered  0 tag  4 code   8 verbs done  12 zero  16 results of these
const (
	taskChain task = 2 // of nodes whose endpoint says so

	// Both lie in the lane's notes, which are of this size there.
	actBytes = 32 << 10
	maxAct   = actBytes / 2
	// maxActed is the longest answer.
	maxActed = actBytes - maxAct
)

// pageBytes is the size of a lane's notes.
func pageBytes(acts bool) int {
	if acts {
		return actBytes
	}
	return notesBytes
}

// halves returns the parts of a lane's notes that have the message and the answer.
func halves(page []byte) (asked, answered []byte) {
	if len(page) == actBytes {
		return page[:maxAct], page[maxAct:]
	}
	return page[:maxAsked], page[answeredAt:]
}

// atomics says whether one of the verbs is an atomic.
func atomics(verbs []rdma.Verb) bool {
	for i := range verbs {
		if op := verbs[i].Op; op == rdma.CompareSwap || op == rdma.FetchAdd {
			return true
		}
	}
	return false
}

// actLengths is what a verb takes in a message, and its result in the answer.
func actLengths(v *rdma.Verb) (request, answer int) {
	switch v.Op {
	case rdma.Write:
		return host.VerbBytes + len(v.Buf), 0
	case rdma.Read:
		return host.VerbBytes, len(v.Buf)
	case rdma.Flush:
		return host.VerbBytes, 0
	}
	return host.VerbBytes, 8
}

// tooLong says whether no message has room for a verb: the adapter executes it.
func tooLong(v *rdma.Verb) bool {
	request, answer := actLengths(v)
	return askedBytes+request > maxAct || answeredBytes+answer > maxActed
}

// fitting is how many of the verbs, from the first on, go into one message.
func fitting(verbs []rdma.Verb) (n int) {
	request, answer := askedBytes, answeredBytes
	for ; n < len(verbs); n++ {
		more, results := actLengths(&verbs[n])
		if request, answer = request+more, answer+results; request > maxAct || answer > maxActed {
			break
		}
	}
	return n
}

// putChain encodes verbs for a window of the node, and returns the length of the message.
// Preconditions: they fit.
func (a asked) putChain(tag uint32, slot int32, key uint64, verbs []rdma.Verb) int {
	a.start(tag, taskChain, uint32(slot), key)
	binary.LittleEndian.PutUint32(a.b[4:], uint32(len(verbs)))
	b := a.b[:askedBytes]
	for i := range verbs {
		b = host.AppendVerb(b, &verbs[i])
	}
	for i := range verbs {
		if v := &verbs[i]; v.Op == rdma.Write {
			b = append(b, v.Buf...)
		}
	}
	return len(b)
}

// slot and key are those of the window.
func (a asked) slot() int32 { return int32(a.region()) }
func (a asked) key() uint64 { return a.epoch() }

// slow says whether processors hash or flush so much for the message that the chains of other lanes must not wait behind it. Its form
// has not been checked.
func (a asked) slow() bool {
	verbs := a.b[askedBytes:]
	return host.Work(verbs[:min(len(verbs), rdma.MaxChainVerbs*host.VerbBytes, a.ranges()*host.VerbBytes)]) > stepBytes
}

// executor executes chains that come as messages, for one goroutine.
type executor struct {
	verbs  []rdma.Verb // of the present one
	answer []byte      // to it, maxActed bytes
}

// newExecutor makes an executor.
func newExecutor() *executor {
	return &executor{verbs: make([]rdma.Verb, 0, rdma.MaxChainVerbs), answer: make([]byte, maxActed)}
}

// act executes a message, all of b, and returns its answer; results are in x.answer, behind the answer's head, of so many bytes together.
// An error means that it is no message of this version, and that nothing has been executed.
func (x *executor) act(b []byte, run func(slot int32, key uint64, verbs []rdma.Verb) (done int, err error)) (f answered, bytes int, err error) {
	if len(b) < askedBytes || len(b) > maxAct {
		return f, 0, errPeer
	}
	a := asked{b}
	head := askedBytes + a.ranges()*host.VerbBytes
	if a.task() != taskChain || a.ranges() < 1 || a.ranges() > rdma.MaxChainVerbs || head > len(b) {
		return f, 0, errPeer
	}
	var results int
	x.verbs, results, err = host.DecodeVerbs(x.verbs[:0], b[askedBytes:head], uint32(len(b)-head))
	if err != nil || answeredBytes+results > maxActed {
		return f, 0, errPeer
	}
	payload, at := b[head:], answeredBytes
	for i := range x.verbs {
		switch v := &x.verbs[i]; v.Op {
		case rdma.Write:
			v.Buf, payload = payload[:v.Bytes], payload[v.Bytes:]
		case rdma.Read:
			v.Buf = x.answer[at : at+int(v.Bytes)]
			at += len(v.Buf)
		case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
			at += 8
		}
	}
	f.tag = a.tag()
	f.done, f.err = run(a.slot(), a.key(), x.verbs)
	at = answeredBytes
	for i := range x.verbs[:f.done] {
		at = host.PutResult(x.answer, at, &x.verbs[i])
	}
	return f, at, nil
}

// takeResults takes the results of verbs out of an answer.
func takeResults(b []byte, verbs []rdma.Verb) {
	b = b[answeredBytes:]
	for i := range verbs {
		switch v := &verbs[i]; v.Op {
		case rdma.Read:
			b = b[copy(v.Buf, b):]
		case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
			v.Old, b = binary.LittleEndian.Uint64(b), b[8:]
		}
	}
}

// actedBytes is how long the answer to verbs is.
func actedBytes(verbs []rdma.Verb) int { return answeredBytes + host.ResultBytes(verbs) }
