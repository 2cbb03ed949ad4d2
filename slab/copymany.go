package slab

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

const (
	// copyBytes is how many bytes of a block a copier READs at once unless CopyBy was called.
	copyBytes = 64 << 10
	// maxCopied slabs are reserved, copied and released together: three rounds for
	// all of them.
	maxCopied = 512
	// frameBytes bounds the images of one chain: as much as a server behind a socket reads at
	// once, while the next chain is on its way.
	frameBytes = 48 << 10
)

// CopyBy sets how many bytes of a block Copy READs at once, from its next piece on. That is also
// the most that it holds reserved, and that a rebuilding replica receives without a pause. A
// larger piece costs fewer rounds and keeps other sessions waiting longer. A slab is never
// divided.
// Preconditions: bytes is above 0, and at most a block.
func (l *Lane) CopyBy(bytes int) { l.copyBytes = bytes }

// copies is what a copier gathers from one piece of a block.
type copies struct {
	live   []copying  // LIVE slabs
	free   []word     // V of FREE slabs
	trying []*attempt // of live: those reserved together
}

// copying is a LIVE slab that is being copied. Its img was READ before the slab was reserved, and
// only V is READ again under the reservation: if V is the same, the image is too, because the
// image of a version is written once and before V names it. img is nil if what was READ is not
// whole.
type copying struct {
	attempt
	fate fate
}

// word is V of a FREE slab.
type word struct {
	slab proto.Slab
	v    proto.V
}

// fate says how a slab is copied that was gathered with others.
type fate uint8

const (
	copied  fate = iota // with the others
	alone               // by itself; it is not held, or is released with the others first
	waiting             // by itself; it stays held until then
)

// copies is the lane's storage for what it gathers.
func (l *Lane) copies() *copies {
	if l.gathered == nil {
		l.gathered = &copies{live: make([]copying, 0, maxCopied), free: make([]word, 0, maxCopied)}
	}
	l.gathered.live, l.gathered.free = l.gathered.live[:0], l.gathered.free[:0]
	return l.gathered
}

// add gathers a LIVE slab that has been READ into buf.
func (k *copies) add(reg *Region, s proto.Slab, gen uint32, v proto.V, buf []byte) {
	c := copying{attempt: attempt{object: anyObject(reg, s, gen), sight: sight{v: v}}}
	c.img = c.whole(s.Image(buf, v.Version()), v.Version())
	k.live = append(k.live, c)
}

// copyGathered copies what has been gathered, and forgets it.
func (l *Lane) copyGathered(reg *Region, gen uint32, k *copies, st *Copied) error {
	for rest := k.live; len(rest) > 0; {
		n := min(len(rest), maxCopied)
		if err := l.copyMany(reg, gen, rest[:n], st); err != nil {
			return err
		}
		rest = rest[n:]
	}
	for rest := k.free; len(rest) > 0; {
		n := min(len(rest), maxCopied)
		if err := l.copyWords(reg, rest[:n], st); err != nil {
			return err
		}
		rest = rest[n:]
	}
	k.live, k.free = k.live[:0], k.free[:0]
	return nil
}

// chains opens one chain after the other to a target of the round.
type chains struct {
	round *rdma.Round
	to    *rdma.Target
	first int // in the round
	bytes int // of the last chain's WRITEs
}

func (l *Lane) chains(to *rdma.Target) chains {
	return chains{round: &l.round, to: to, first: l.round.Len()}
}

// next returns a chain to the target with room for so many verbs and bytes of WRITEs, and its
// number among the chains of the target.
func (cs *chains) next(verbs, bytes int) (*rdma.Chain, int) {
	n := cs.round.Len()
	if n > cs.first {
		c := cs.round.At(n - 1)
		if len(c.Verbs)+verbs <= rdma.MaxChainVerbs && cs.bytes+bytes <= frameBytes {
			cs.bytes += bytes
			return c, n - 1 - cs.first
		}
	}
	cs.bytes = bytes
	return cs.round.Chain(cs.to), n - cs.first
}

// copyMany copies LIVE slabs together, in three rounds: reserve, write, release. Slabs with which
// anything goes otherwise than expected are copied by themselves afterwards.
func (l *Lane) copyMany(reg *Region, gen uint32, slabs []copying, st *Copied) error {
	words, err := l.buffer(&l.batch.imgs, 8*len(slabs))
	if err != nil {
		return err
	}
	trying := l.gathered.trying[:0]
	for i := range slabs {
		o := &slabs[i]
		o.off, o.seen, o.fate = o.slab.VOff(), words[8*i:8*i+8], copied
		trying = append(trying, &o.attempt)
	}
	l.gathered.trying = trying
	l.reserveRound(trying...)
	if l.round.Err() != nil {
		for i := range slabs {
			slabs[i].fate = alone
		}
		if err := l.releaseAll(reg, slabs); err != nil { // those that were reserved
			return err
		}
		return l.copyRest(reg, gen, slabs, st)
	}
	for i := range slabs {
		o := &slabs[i]
		v := proto.V(proto.Word(o.seen, 0))
		switch {
		case o.holder != 0:
			o.fate, o.r = alone, 0 // held by another session
		case o.img == nil, v != o.v:
			o.fate = alone // changed since, or damaged: once it has been released
		}
	}
	if err := l.writeCopies(reg, slabs, st); err != nil {
		return err
	}
	if err := l.releaseMany(reg, slabs); err != nil {
		return err
	}
	return l.copyRest(reg, gen, slabs, st)
}

// writeCopies writes the images of the slabs that are held, and their V, to every rebuilding replica.
func (l *Lane) writeCopies(reg *Region, slabs []copying, st *Copied) error {
	l.round.Reset()
	var firsts [MaxListed]int // the first chain to each rebuilding replica
	n := 0
	for j := 1; j < reg.N; j++ {
		if !reg.Rebuilding[j] {
			continue
		}
		cs := l.chains(reg.To[j])
		for i := range slabs {
			o := &slabs[i]
			if o.fate != copied {
				continue
			}
			var c *rdma.Chain
			c, o.chain = cs.next(4, len(o.img))
			o.verb = replaceV(c, &o.object, 0, o.v, o.img)
		}
		firsts[n], n = cs.first, n+1
	}
	if l.round.Len() == 0 {
		return nil
	}
	l.do()
	if l.round.Err() != nil {
		if err := l.again(&slabs[0].attempt); err != nil {
			return err
		}
		for i := range slabs {
			if slabs[i].fate == copied {
				slabs[i].fate = waiting // written or not: alone it finds out
			}
		}
		return nil
	}
	for i := range slabs {
		o := &slabs[i]
		if o.fate != copied {
			continue
		}
		for _, first := range firsts[:n] {
			if !l.round.At(first + o.chain).Verbs[o.verb].Swapped() {
				o.fate = waiting
			}
		}
		if o.fate == copied {
			st.Images++
			st.Bytes += len(o.img)
		}
	}
	return nil
}

// releaseMany releases the slabs that are held and have been copied, or are to be
// copied alone.
func (l *Lane) releaseMany(reg *Region, slabs []copying) error {
	l.round.Reset()
	for i := range slabs {
		if o := &slabs[i]; o.r != 0 && o.fate != waiting {
			_, c := l.chainFor(reg.P(), 1)
			dropR(c, &o.attempt)
		}
	}
	if l.round.Len() == 0 {
		return nil
	}
	l.do()
	if l.round.Err() == nil {
		return nil
	}
	return l.releaseAll(reg, slabs)
}

// releaseAll settles a failed round, and releases one by one the slabs that the lane may hold,
// but those that wait to be copied. It may be repeated, because the values of R are the lane's
// own.
func (l *Lane) releaseAll(reg *Region, slabs []copying) error {
	if err := l.again(&slabs[0].attempt); err != nil {
		return err
	}
	for i := range slabs {
		if o := &slabs[i]; o.r != 0 && o.fate != waiting {
			if err := l.release(&o.attempt); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyRest copies by themselves the slabs that could not be copied with the others.
func (l *Lane) copyRest(reg *Region, gen uint32, slabs []copying, st *Copied) error {
	// Those that are held first: others wait for them.
	for i := range slabs {
		if slabs[i].fate != waiting {
			continue
		}
		a := &slabs[i].attempt
		if err := l.copyImage(a, st); err != nil {
			return err
		}
		if err := l.release(a); err != nil {
			return err
		}
	}
	for i := range slabs {
		if slabs[i].fate == alone {
			// LIVE, so that it is looked at under a reservation.
			if err := l.copySlab(reg, slabs[i].slab, gen, proto.MakeV(proto.StateLive, 0), st); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyWords raises V of FREE slabs together, from 0. A replica that has another V is served by
// copyWord.
func (l *Lane) copyWords(reg *Region, words []word, st *Copied) error {
	st.Words += len(words)
	var at [maxCopied]struct{ chain, verb int }
	var firsts [MaxListed]int // the first chain to each rebuilding replica
	n := 0
	err := l.repeat(reg, func() {
		n = 0
		for j := 1; j < reg.N; j++ {
			if !reg.Rebuilding[j] {
				continue
			}
			cs := l.chains(reg.To[j])
			for i, w := range words {
				c, chain := cs.next(2, 0)
				o := object{reg: reg, slab: w.slab}
				at[i].chain, at[i].verb = chain, replaceV(c, &o, 0, w.v, nil)
			}
			firsts[n], n = cs.first, n+1
		}
	})
	if err != nil {
		return err
	}
	var late [maxCopied]bool
	for i := range words {
		for _, first := range firsts[:n] {
			late[i] = late[i] || !l.round.At(first + at[i].chain).Verbs[at[i].verb].Swapped()
		}
	}
	for i, w := range words {
		if late[i] {
			if err := l.copyWord(reg, w.slab, w.v); err != nil {
				return err
			}
		}
	}
	return nil
}
