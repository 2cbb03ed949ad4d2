package slab

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// The chains of commits, takeovers, repairs and copies:
//
//	take R      CAS R, READ the slab        reserve, takeover, repair, copy
//	replace V   WRITE image, CAS V          commit, roll-back, repair, copy
//	release     CAS R to 0                  the end of all of them
//
// On a durable region a FLUSH follows every WRITE and CAS that a later answer relies on.
//
// A fence costs a round trip of its own on a queue pair. Chains that commit several slabs post
// one kind of verb for all of them before the next kind, and fence the first of each kind alone:
// everything behind a fence is ordered by it too.

// chainFor returns the round's chain to a target that has room for so many more verbs, and opens
// one if there is none. The chain is number i of the round.
func (l *Lane) chainFor(to *rdma.Target, verbs int) (i int, c *rdma.Chain) {
	if l.round.Len() == 0 {
		return 0, l.round.Chain(to) // a batch of one is not worth the loop
	}
	return l.chainAmong(to, verbs)
}

// chainAmong is chainFor in a round that has chains already.
func (l *Lane) chainAmong(to *rdma.Target, verbs int) (i int, c *rdma.Chain) {
	for i := range l.round.Len() {
		if c := l.round.At(i); c.To == to && len(c.Verbs)+verbs <= rdma.MaxChainVerbs {
			return i, c
		}
	}
	return l.round.Len(), l.round.Chain(to)
}

// onlyChain returns the round's chain to a target, and opens one if there is none. The chain is
// number i of the round.
// Preconditions: all verbs to a target fit into one chain, and the round is for at most maxWrites
// slabs.
func (l *Lane) onlyChain(to *rdma.Target) (i int, c *rdma.Chain) {
	for i := range l.round.Len() {
		if c := l.round.At(i); c.To == to {
			return i, c
		}
	}
	i = l.round.Len()
	l.fenced[i] = 0
	return i, l.round.Chain(to)
}

// fenceOnce is true for the first verb of a kind in chain i of a commit. That verb gets a fence,
// which orders the later verbs of the kind too.
func (l *Lane) fenceOnce(i int, k kind) bool {
	first := l.fenced[i]>>k&1 == 0
	l.fenced[i] |= 1 << k
	return first
}

// takeR appends CAS R from the value expected to the attempt's own. It returns the
// index of the verb.
func takeR(c *rdma.Chain, a *attempt, expect proto.R) int {
	return c.CAS(a.slab.ROff(), uint64(expect), uint64(a.r))
}

// dropR appends CAS R from the attempt's own value to 0.
func dropR(c *rdma.Chain, a *attempt) {
	c.CAS(a.slab.ROff(), uint64(a.r), 0)
}

// replaceV appends the verbs that bring one replica from V = expect to V = v: WRITE of the image
// that v names, unless img is nil, and CAS of V behind it. It returns the index of the CAS.
//
// The image comes first, so that no replica's V names an image that the replica does not have.
func replaceV(c *rdma.Chain, o *object, expect, v proto.V, img []byte) int {
	writeImage(c, o, v, img)
	cas := changeV(c, o, expect, v, img != nil)
	flushV(c, o, true)
	return cas
}

// changeV appends the CAS of V. On a durable region fenced puts it behind the FLUSHes of the
// images, so that V never names an image that a loss of power could take away.
func changeV(c *rdma.Chain, o *object, expect, v proto.V, fenced bool) int {
	cas := c.CAS(o.slab.VOff(), uint64(expect), uint64(v))
	if o.reg.Durable && fenced {
		fence(c)
	}
	return cas
}

// flushV appends the FLUSH of V on a durable region; fenced keeps it behind the CAS of V.
func flushV(c *rdma.Chain, o *object, fenced bool) {
	if !o.reg.Durable {
		return
	}
	c.Flush(flushKind, o.slab.VOff(), 8)
	if fenced {
		fence(c)
	}
}

// writeImage appends the WRITE of the image that v names, unless img is nil.
func writeImage(c *rdma.Chain, o *object, v proto.V, img []byte) {
	if img == nil {
		return
	}
	off := o.slab.ImageOff(v.Version())
	c.Write(off, img)
	if o.reg.Durable {
		flush(c, off, uint64(len(img)))
	}
}

// flush appends a FLUSH, ordered behind the verb before it.
func flush(c *rdma.Chain, off, bytes uint64) {
	atomicBefore := len(c.Verbs) > 0 && c.Verbs[len(c.Verbs)-1].Op != rdma.Write
	c.Flush(flushKind, off, bytes)
	if atomicBefore {
		fence(c)
	}
}

// fence orders the last verb, and those that follow it, behind all READs, atomics and FLUSHes
// before it in the chain: a queue pair keeps only WRITEs in order by itself.
func fence(c *rdma.Chain) {
	c.Fenced()
}

// casOf returns the answer of the first CAS in a chain: the word that it found, and whether it
// took effect. A chain without a CAS counts as swapped.
func casOf(c *rdma.Chain) (old uint64, swapped bool) {
	for i := range c.Verbs {
		if v := &c.Verbs[i]; v.Op == rdma.CompareSwap {
			return v.Old, v.Swapped()
		}
	}
	return 0, true
}

// allSwapped says whether every CAS of the round took effect.
func (l *Lane) allSwapped() bool {
	for i := range l.round.Len() {
		for j := range l.round.At(i).Verbs {
			if v := &l.round.At(i).Verbs[j]; v.Op == rdma.CompareSwap && !v.Swapped() {
				return false
			}
		}
	}
	return true
}
