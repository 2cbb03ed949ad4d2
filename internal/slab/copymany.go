package slab

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// maxCopied slabs are reserved, copied and released together: three rounds for all
// of them. Each is held for as long as that takes, so they are not many.
const maxCopied = 32

// copies is what a copier gathers from one piece of a block.
type copies struct {
	live  []proto.Slab
	ops   []op
	fate  []fate
	free  []proto.Slab
	words []proto.V // of free
}

// fate of a slab that was to be copied with others.
type fate uint8

const (
	copied  fate = iota // released with the others
	alone               // not held: to be copied alone
	waiting             // held, and to be copied alone before it is released
)

func newCopies() *copies {
	return &copies{ops: make([]op, maxCopied), fate: make([]fate, maxCopied)}
}

// copyGathered copies what has been gathered.
func (l *Lane) copyGathered(reg *Region, gen uint32, k *copies, st *Copied) error {
	for len(k.live) > 0 {
		n := min(len(k.live), maxCopied, max(1, pieceBytes/k.live[0].Class.Bytes()))
		if err := l.copyMany(reg, gen, k, k.live[:n], st); err != nil {
			return err
		}
		k.live = k.live[n:]
	}
	for len(k.free) > 0 {
		n := min(len(k.free), maxCopied)
		if err := l.copyWords(reg, k.free[:n], k.words[:n], st); err != nil {
			return err
		}
		k.free, k.words = k.free[n:], k.words[n:]
	}
	return nil
}

// copyMany copies LIVE slabs together. What does not go smoothly is copied alone.
func (l *Lane) copyMany(reg *Region, gen uint32, k *copies, slabs []proto.Slab, st *Copied) error {
	size := slabs[0].Class.Bytes()
	buf, err := l.buffer(&l.batch.imgs, size*len(slabs))
	if err != nil {
		return err
	}
	ops, fates := k.ops[:len(slabs)], k.fate[:len(slabs)]
	l.round.Reset()
	c := l.round.Chain(reg.P())
	for i, s := range slabs {
		ops[i] = op{reg: reg, slab: s, seed: proto.Seed(reg.Seed, s.Off, gen), ref: proto.Ref{Addr: proto.MakeAddr(reg.ID, uint32(s.Off))}, r: l.port.Reservation()}
		fates[i] = copied
		c.CAS(s.ROff(), 0, uint64(ops[i].r))
		c.Read(s.Off, buf[i*size:(i+1)*size])
	}
	l.do()
	if c.Err != nil {
		for i := range fates {
			fates[i] = alone
		}
		if err := l.releaseAll(reg, ops); err != nil { // those that were reserved
			return err
		}
		return l.copyRest(reg, gen, ops, fates, buf, st)
	}
	for i := range ops {
		o := &ops[i]
		_, o.v = o.slab.Words(buf[i*size:])
		if c.Verbs[2*i].Old != 0 {
			fates[i] = alone
			o.r = 0 // somebody else's
		} else if o.v.State() != proto.StateLive {
			fates[i] = alone // once it has been released
		}
	}
	if err := l.writeCopies(reg, ops, fates, buf, st); err != nil {
		return err
	}
	if err := l.releaseMany(reg, ops, fates); err != nil {
		return err
	}
	return l.copyRest(reg, gen, ops, fates, buf, st)
}

// writeCopies writes the images of the slabs that are held, and their V, to every joiner.
func (l *Lane) writeCopies(reg *Region, ops []op, fates []fate, buf []byte, st *Copied) error {
	size := ops[0].slab.Class.Bytes()
	bytes, images := 0, 0
	l.round.Reset()
	for j := 1; j < reg.N; j++ {
		if reg.Rebuilding[j] {
			l.round.Chain(reg.To[j])
		}
	}
	for i := range ops {
		o := &ops[i]
		if fates[i] != copied {
			continue
		}
		img := o.slab.Image(buf[i*size:(i+1)*size], o.v.Version())
		h, _, ok := proto.OpenImage(img, o.seed)
		if !ok || h.Version != o.v.Version() {
			fates[i] = waiting // damaged: another replica may have it
			continue
		}
		img = img[:proto.ImageLen(h.Length)]
		bytes, images = bytes+len(img), images+1
		for j := range l.round.Len() {
			c := l.round.At(j)
			l.writeImage(c, o, change{v: o.v, at: o.slab.ImageOff(o.v.Version()), img: img})
			c.CAS(o.slab.VOff(), 0, uint64(o.v))
			if reg.Durable {
				l.fence(c)
				l.flush(c, o.slab.VOff(), 8)
			}
		}
	}
	if images == 0 {
		return nil
	}
	l.do()
	if l.round.Err() != nil {
		if err := l.settle(reg); err != nil {
			return l.abandon(&ops[0], err)
		}
		if l.epochOver(&ops[0]) {
			return ErrEpochOver
		}
		for i := range fates {
			if fates[i] == copied {
				fates[i] = waiting // written or not: alone it finds out
			}
		}
		return nil
	}
	for j := range l.round.Len() {
		verbs := l.round.At(j).Verbs
		at := 0
		for i := range ops {
			// The flips stand in the order of the slabs, one for each.
			if fates[i] != copied && fates[i] != waiting || !written(verbs, &at, ops[i].slab.VOff()) {
				continue
			}
			if !verbs[at].Swapped() {
				fates[i] = waiting
			}
			at++
		}
	}
	st.Images, st.Bytes = st.Images+images, st.Bytes+bytes
	return nil
}

// releaseMany releases the slabs that are held and have been copied, or were not LIVE.
func (l *Lane) releaseMany(reg *Region, ops []op, fates []fate) error {
	l.round.Reset()
	c := l.round.Chain(reg.P())
	for i := range ops {
		if ops[i].r != 0 && fates[i] != waiting {
			c.CAS(ops[i].slab.ROff(), uint64(ops[i].r), 0)
		}
	}
	if len(c.Verbs) == 0 {
		return nil
	}
	l.do()
	if c.Err == nil {
		return nil
	}
	var again []op
	for i := range ops {
		if ops[i].r != 0 && fates[i] != waiting {
			again = append(again, ops[i])
		}
	}
	return l.releaseAll(reg, again)
}

// releaseAll settles a failed round and releases, one by one, what the lane may
// hold: the values of R are nobody else's, so that it can be repeated.
func (l *Lane) releaseAll(reg *Region, ops []op) error {
	if err := l.settle(reg); err != nil {
		return l.abandon(&ops[0], err)
	}
	if l.epochOver(&ops[0]) {
		return ErrEpochOver // reservations do not outlive an epoch
	}
	for i := range ops {
		if err := l.release(&ops[i]); err != nil {
			return err
		}
	}
	return nil
}

// copyRest copies alone what could not be copied with the others.
func (l *Lane) copyRest(reg *Region, gen uint32, ops []op, fates []fate, buf []byte, st *Copied) error {
	size := ops[0].slab.Class.Bytes()
	// Those that are held first: others wait for them.
	for i := range ops {
		if fates[i] != waiting {
			continue
		}
		l.op = ops[i]
		slab, err := l.buffer(&l.slab, size)
		if err != nil {
			return l.abandon(&l.op, err)
		}
		copy(slab, buf[i*size:(i+1)*size])
		if err := l.copyImage(&l.op, st); err != nil {
			return err
		}
		if err := l.release(&l.op); err != nil {
			return err
		}
	}
	for i := range ops {
		if fates[i] == alone {
			// LIVE, so that it is looked at under a reservation.
			if err := l.copySlab(reg, ops[i].slab, gen, proto.MakeV(proto.StateLive, 0), st); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyWords moves V of FREE slabs forward together, from 0; those that are found
// otherwise are moved alone.
func (l *Lane) copyWords(reg *Region, slabs []proto.Slab, words []proto.V, st *Copied) error {
	st.Words += len(slabs)
	err := l.repeat(reg, func() {
		for j := 1; j < reg.N; j++ {
			if !reg.Rebuilding[j] {
				continue
			}
			c := l.round.Chain(reg.To[j])
			for i, s := range slabs {
				c.CAS(s.VOff(), 0, uint64(words[i]))
				if reg.Durable {
					l.flush(c, s.VOff(), 8)
				}
			}
		}
	})
	if err != nil {
		return err
	}
	var late [maxCopied]bool
	for j := range l.round.Len() {
		verbs := l.round.At(j).Verbs
		at := 0
		for i, s := range slabs {
			if written(verbs, &at, s.VOff()) {
				late[i] = late[i] || !verbs[at].Swapped()
				at++
			}
		}
	}
	for i, s := range slabs {
		if late[i] {
			if err := l.copyWord(reg, s, words[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// written moves at forward to the CAS of a word, if it is the next in the list.
func written(verbs []rdma.Verb, at *int, off uint64) bool {
	for k := *at; k < len(verbs); k++ {
		if verbs[k].Op == rdma.CompareSwap {
			if verbs[k].Off != off {
				return false
			}
			*at = k
			return true
		}
	}
	return false
}
