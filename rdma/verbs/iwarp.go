//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import "github.com/quarrystore/quarry/rdma"

// iwarpReceives is how many receives a node's queue pair has over iWARP, which ends a connection where a message meets none: for the
// SENDs of no bytes by which the client wakes the node, and one request.
const iwarpReceives = 64

// receives is how many a node's queue pair has.
func (d *device) receives() int {
	if d.caps.IWARP {
		return iwarpReceives
	}
	return 1
}

// more is how many work requests a part of a chain may have beyond its verbs.
func (d *device) more() int { return int(d.iwarp()) }

// iwarp is 1 if the transport is iWARP, for the C shim.
func (d *device) iwarp() C.int {
	if d.caps.IWARP {
		return 1
	}
	return 0
}

// sinkAccess is the access that memory has into which READs bring something: over iWARP what they bring is a remote write.
func (d *device) sinkAccess() C.int {
	if d.caps.IWARP {
		return C.IBV_ACCESS_LOCAL_WRITE | C.IBV_ACCESS_REMOTE_WRITE
	}
	return C.IBV_ACCESS_LOCAL_WRITE
}

// base is the address of memory as the device counts it.
func (d *device) base(mem []byte) uint64 {
	if d.caps.IWARP { // not every driver counts from where it is told
		return addressOf(mem)
	}
	return 0
}

// overIWARP adapts a part that has been written down. A READ cannot have a fence there, and needs none, since READs are executed in
// their order behind WRITEs: the next verb has it. The completion of a WRITE says only that its bytes are on their way, so that a
// READ follows one that is the last.
func (c *conn) overIWARP(p *posted) {
	var fence C.uint8_t
	var last *C.q_verb
	for i := range p.wrs {
		d := &c.verbs[i]
		if d.op == C.Q_SKIP {
			continue
		}
		d.fence |= fence
		if fence = 0; d.op == C.Q_READ {
			fence, d.fence = d.fence, 0
		}
		last = d
	}
	if last == nil || last.op != C.Q_WRITE {
		return
	}
	word := addressOf(c.answers) + 8*uint64(p.slot*rdma.MaxChainVerbs+p.wrs-1)
	c.verbs[p.wrs] = C.q_verb{op: C.Q_READ, len: min(8, last.len), remote: last.remote, rkey: last.rkey, local: C.uint64_t(word), lkey: C.uint32_t(c.answersMR.lkey)}
	p.wrs++
}
