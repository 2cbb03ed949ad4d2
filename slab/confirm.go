package slab

import (
	"github.com/quarrystore/quarry/proto"
)

// confirm finds the value of an object whose V was found open, at version n. One round, which READs V of the other replicas in use:
//
//	all n        n is committed: image n, as READ
//	some m < n   n was not committed when that V was READ, and m was before its successor was begun: image m. It is in what was READ, or
//	             is READ where m was seen; then there is another round
//	some > n     what is ahead was made on n. READ V once more: still n, so that this replica lacks what is ahead, and that is not
//	             committed: image n. Otherwise the object is READ again
//
// Nothing but equality shows that a replica has n: one that is ahead may have had its V put back meanwhile. A V that is not valid
// does not count, for takers neither (standing). A reader never waits for a writer. In a durable region all words are flushed before anything is concluded (O6).
//
// Linearizes at: the last of these READs for image n, the READ of m for image m.
//
// It sets the sight of k as that of a settled V. errAgain: no answer.
func (l *Lane) confirm(k *reading) error {
	l.round.Reset()
	for i := range k.reg.N {
		switch {
		case i != k.at:
			l.round.Chain(k.reg.To[i]).Read(k.slab.VOff(), l.words[i])
		case k.reg.Durable:
			l.round.Chain(k.reg.To[i])
		default:
			continue
		}
		if k.reg.Durable {
			flush(l.round.At(l.round.Len()-1), k.slab.VOff(), 8)
		}
	}
	if l.round.Len() > 0 {
		l.do()
	}
	if l.round.Err() != nil {
		return l.readLost(k)
	}
	more, less := false, -1
	for i := range k.reg.N {
		if i == k.at {
			continue
		}
		v := proto.V(proto.Word(l.words[i], 0))
		switch rebuilding := k.reg.Rebuilding[i]; {
		case rebuilding && v == 0, !k.valid(v): // nothing has visited it, or it is damaged: it does not count
		case v.Version() == k.v.Version():
		case v.Version() > k.v.Version():
			more = true
		case less < 0 || k.reg.Rebuilding[less]:
			less = i
		}
	}
	switch {
	case more:
		return l.confirmBehind(k)
	case less >= 0:
		return l.predecessor(k, less, proto.V(proto.Word(l.words[less], 0)).Settled())
	}
	l.help(k)
	return nil
}

// confirmBehind READs V at k's replica once more, where another replica is ahead.
func (l *Lane) confirmBehind(k *reading) error {
	l.round.Reset()
	c := l.round.Chain(k.reg.To[k.at])
	c.Read(k.slab.VOff(), l.word[:8])
	if k.reg.Durable {
		flush(c, k.slab.VOff(), 8)
	}
	if l.do(); l.round.Err() != nil {
		return l.readLost(k)
	}
	if proto.V(proto.Word(l.word, 0)).Settled() != k.v {
		k.state = imageTorn
	}
	return nil
}

// predecessor sets the sight of k to version v, which replica i has while k's replica has a later one that is not committed.
func (l *Lane) predecessor(k *reading, i int, v proto.V) error {
	k.v = v
	switch v.State() {
	case proto.StateFree:
		k.state = imageFreed
		return nil
	case proto.StateBad:
		k.state = imageDamaged
		return nil
	}
	img := k.slab.ImageIn(k.off, k.buf, v.Version())
	if h, payload, ok := decode(k, img, v); ok {
		k.show(h, payload)
		return nil
	}
	if k.reg.Rebuilding[i] {
		i = k.at // no image of a rebuilding replica is used; this one has it too, until the successor is committed
	}
	img, err := l.buffer(&l.image, k.slab.Class.ImageBytes(k.slab.Kind))
	if err != nil {
		return err
	}
	l.round.Reset()
	l.round.Chain(k.reg.To[i]).Read(k.slab.ImageOff(v.Version()), img)
	if l.do(); l.round.Err() != nil {
		return l.readLost(k)
	}
	k.state = imageTorn // changed meanwhile
	if h, payload, ok := decode(k, img, v); ok {
		k.show(h, payload)
	}
	return nil
}

// decode is the image that v names, if img is that.
func decode(k *reading, img []byte, v proto.V) (h proto.ImageHeader, payload []byte, ok bool) {
	if img == nil {
		return h, nil, false
	}
	h, payload, ok = proto.DecodeImage(img, k.seed)
	return h, payload, ok && h.Version == v.Version()
}

// show sets the sight of k to an image that is whole.
func (k *reading) show(h proto.ImageHeader, payload []byte) {
	if k.state = imageFreed; h.Born == k.ref.Incarnation.Born() {
		k.state, k.header, k.payload = imageLive, h, payload
	}
}

// readLost settles a failed round of a read.
func (l *Lane) readLost(k *reading) error {
	if err := l.settle(k.reg); err != nil {
		return err
	}
	return errAgain
}
