package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Limits of one batch round: verbs fit one chain, bytes fit a lane's scratch.
const (
	batchVerbs = rdma.MaxChainVerbs / 2
	batchBytes = 1 << 20
	// localBytes is batchBytes where rounds are free: what is read stays in the
	// second-level cache until it has been sealed and copied.
	localBytes = 256 << 10
)

// item is one object of a batch.
type item struct {
	op
	index  int // in the caller's list
	chain  int
	verb   int    // of its first verb in the chain
	off    uint64 // where so many bytes are READ
	bytes  int
	buf    []byte
	img    []byte
	ch     change
	ready  bool
	broken bool // its chain had no answer
	found  proto.V
}

// batch is the lane's storage for batched calls.
type batch struct {
	items []item
	slabs []byte
	imgs  []byte
	retry []int       // indices of what ReadMany reads by itself
	rest  []proto.Ref // chunks that ReadChunks could not read in place
	ats   []int       // and where their payloads go
}

// chainFor finds or opens the round's chain for a target that has room.
func (l *Lane) chainFor(to *rdma.Target, verbs int) (int, *rdma.Chain) {
	for i := range l.round.Len() {
		if c := l.round.At(i); c.To == to && len(c.Verbs)+verbs <= rdma.MaxChainVerbs {
			return i, c
		}
	}
	return l.round.Len(), l.round.Chain(to)
}

// ReadMany reads objects and calls fn for each, in any order, with its payload or
// its error. Payloads alias scratch memory. One round for up to 128 objects and
// 1 MiB of slabs, one more if some of them were expected in the other half of
// their slabs; what a concurrent writer disturbs is read again by itself.
func (l *Lane) ReadMany(refs []proto.Ref, fn func(i int, payload []byte, info Info, err error)) error {
	b := &l.batch
	for next := 0; next < len(refs); {
		b.items, b.retry = b.items[:0], b.retry[:0]
		for bytes := 0; next < len(refs) && len(b.items) < batchVerbs; next++ {
			if err := l.begin(refs[next]); err != nil {
				if errors.Is(err, errAgain) {
					b.retry = append(b.retry, next)
				} else {
					fn(next, nil, Info{}, err)
				}
				continue
			}
			it := item{op: l.op, index: next, off: l.op.slab.Off, bytes: l.op.slab.Class.Bytes()}
			most := batchBytes
			if it.reg.Local {
				most = localBytes
			}
			if it.bytes >= halfBytes || !it.reg.Local {
				it.off, it.bytes = l.halves.part(&l.op)
			}
			if len(b.items) > 0 && bytes+it.bytes > most {
				break
			}
			bytes += it.bytes
			b.items = append(b.items, it)
		}
		for len(b.items) > 0 {
			if err := l.readItems(fn); err != nil {
				return err
			}
		}
		for _, i := range b.retry {
			payload, info, err := l.Read(refs[i], nil)
			fn(i, payload, info, err)
		}
	}
	return nil
}

// readItems READs the batch in one round and calls fn for what that answers. What
// is left in the batch is to be READ again, whole; b.retry goes by itself.
func (l *Lane) readItems(fn func(i int, payload []byte, info Info, err error)) error {
	b := &l.batch
	bytes := 0
	for i := range b.items {
		bytes += b.items[i].bytes
	}
	buf, err := l.buffer(&b.slabs, bytes)
	if err != nil {
		return err
	}
	l.round.Reset()
	for i := range b.items {
		it := &b.items[i]
		it.buf, buf = buf[:it.bytes], buf[it.bytes:]
		var c *rdma.Chain
		it.chain, c = l.chainFor(it.reg.P(), 1)
		c.Read(it.off, it.buf)
	}
	l.do()
	lease, reg := l.answer(nil), b.items[0].reg
	left := b.items[:0]
	for i := range b.items {
		it := &b.items[i]
		if l.round.At(it.chain).Err != nil {
			b.retry = append(b.retry, it.index)
			continue
		}
		switch vw, _, h, payload := l.lookIn(&it.op, it.off, it.buf); vw {
		case viewLive:
			fn(it.index, payload, infoOf(h), lease)
		case viewFreed:
			fn(it.index, nil, Info{}, l.answer(ErrFreed))
		case viewOther:
			it.off, it.bytes = it.slab.Off, it.slab.Class.Bytes()
			left = append(left, *it)
		default:
			b.retry = append(b.retry, it.index)
		}
	}
	b.items = left
	if l.round.Err() == nil {
		return nil
	}
	// The table may have changed: everything that is left starts again.
	for i := range left {
		b.retry = append(b.retry, left[i].index)
	}
	b.items = left[:0]
	if err = l.settle(reg); err != nil {
		for _, i := range b.retry {
			fn(i, nil, Info{}, err)
		}
	}
	return err
}

// WriteMany replaces the payloads of objects; errs[i] is the answer for refs[i].
// Two rounds (three with backups) for up to 64 objects and 1 MiB; an object that
// somebody else holds is written by itself afterwards, so nobody waits for
// another object while holding one.
func (l *Lane) WriteMany(refs []proto.Ref, payloads [][]byte, errs []error) {
	for next := 0; next < len(refs); {
		n := l.reserveMany(refs[next:], payloads[next:], errs[next:])
		l.commitMany(refs[next:next+n], payloads[next:next+n], errs[next:next+n])
		next += n
	}
}

// writeOne is the path of an object that the batch could not take along.
func (l *Lane) writeOne(ref proto.Ref, payload []byte) error {
	_, err := l.Update(ref, func(_ []byte, info *Info) ([]byte, error) {
		if info.Tag&proto.TagIndex != 0 {
			return nil, ErrIndex
		}
		return payload, nil
	})
	return err
}

// errLater marks an object for writeOne after the batch.
var errLater = errors.New("by itself")

// ErrIndex: WriteMany left the object alone because it is an index; see proto.TagIndex.
var ErrIndex = errors.New("object is an index")

// reserveMany reserves as many of the first refs as fit one batch and returns how
// many it dealt with: those it holds are in l.batch.items, ready.
func (l *Lane) reserveMany(refs []proto.Ref, payloads [][]byte, errs []error) int {
	b := &l.batch
	b.items = b.items[:0]
	n, bytes, imgs := 0, 0, 0
	for ; n < len(refs) && len(b.items) < batchVerbs/2; n++ {
		err := l.begin(refs[n])
		switch room := 0; {
		case errors.Is(err, errAgain):
			errs[n] = errLater
			continue
		case err == nil && l.op.slab.Kind == proto.Single:
			err = fmt.Errorf("%w: %v", ErrImmutable, refs[n])
		case err == nil:
			if room = l.op.slab.Class.PayloadBytes(proto.Pair); len(payloads[n]) > room {
				err = fmt.Errorf("%w: %d bytes, this object has room for %d", ErrTooLarge, len(payloads[n]), room)
			}
		}
		if errs[n] = err; err != nil {
			continue
		}
		size := l.op.slab.Class.Bytes()
		if len(b.items) > 0 && bytes+size > batchBytes {
			break
		}
		bytes += size
		imgs += proto.ImageLen(len(payloads[n]))
		b.items = append(b.items, item{op: l.op, index: n})
	}
	slabs, err1 := l.buffer(&b.slabs, bytes)
	images, err2 := l.buffer(&b.imgs, imgs)
	if err := errors.Join(err1, err2); err != nil {
		for i := range b.items {
			errs[b.items[i].index] = err
		}
		b.items = b.items[:0]
	}
	if len(b.items) == 0 {
		return n
	}
	l.round.Reset()
	for i := range b.items {
		it := &b.items[i]
		it.buf, slabs = slabs[:it.slab.Class.Bytes()], slabs[it.slab.Class.Bytes():]
		size := proto.ImageLen(len(payloads[it.index]))
		it.img, images = images[:size], images[size:]
		it.r = l.port.Reservation()
		var c *rdma.Chain
		it.chain, c = l.chainFor(it.reg.P(), 2)
		it.verb = c.CAS(it.slab.ROff(), 0, uint64(it.r))
		c.Read(it.slab.Off, it.buf)
	}
	l.do()
	broken := l.round.Err() != nil
	for i := range b.items {
		it := &b.items[i]
		c := l.round.At(it.chain)
		it.ready = c.Err == nil && c.Verbs[it.verb].Old == 0
		if !it.ready {
			errs[it.index] = errLater
		}
		it.broken = c.Err != nil
	}
	if broken {
		l.reserveManyBroken(b, errs)
	}
	for i := range b.items {
		if it := &b.items[i]; it.ready {
			l.prepare(it, payloads[it.index], errs)
		}
	}
	return n
}

// reserveManyBroken settles a batch whose reserving round lost answers: what may
// be held is given back, and written one by one later.
func (l *Lane) reserveManyBroken(b *batch, errs []error) {
	err := l.settle(b.items[0].reg)
	for i := range b.items {
		it := &b.items[i]
		if err != nil {
			errs[it.index], it.ready = err, false
			continue
		}
		if it.broken {
			if rerr := l.reserveUnknown(&it.op); rerr != nil && !errors.Is(rerr, errAgain) {
				errs[it.index] = rerr
			}
		}
	}
	if err != nil {
		_ = l.abandon(&b.items[0].op, err)
	}
}

// prepare judges a reserved slab and seals the image to be written.
func (l *Lane) prepare(it *item, payload []byte, errs []error) {
	// nextVersion and look work on l.slab: lend it the item's READ.
	own := l.slab
	l.slab = it.buf
	vw, v, h, _ := l.look(&it.op, it.buf)
	it.v = v
	n := l.nextVersion(&it.op)
	l.slab = own
	err := l.answer(nil)
	switch {
	case vw == viewFreed:
		err = l.answer(ErrFreed)
	case vw == viewLive && h.Tag&proto.TagIndex != 0:
		err = ErrIndex
	case vw != viewLive || n > proto.MaxVersion:
		err = errLater
	}
	if err != nil {
		it.ready, errs[it.index] = false, err
		if rerr := l.release(&it.op); rerr != nil {
			errs[it.index] = rerr
		}
		return
	}
	h.Version, h.Length, h.Writer = n, len(payload), it.r
	copy(it.img[proto.ImageHeaderBytes:], payload)
	proto.SealImage(it.img, it.seed, h)
	it.ch = change{v: proto.MakeV(proto.StateLive, n), at: it.slab.ImageOff(n), img: it.img}
}

// commitMany commits the reserved items in one round (two with backups), then
// writes by itself what the batch left.
func (l *Lane) commitMany(refs []proto.Ref, payloads [][]byte, errs []error) {
	b := &l.batch
	ready := 0
	for i := range b.items {
		if b.items[i].ready {
			ready++
		}
	}
	// Backups first, for all objects in one round; a round that fails or finds a
	// joiner behind is repeated object by object, which is safe while R is held.
	if ready > 0 {
		l.round.Reset()
		for i := range b.items {
			if it := &b.items[i]; it.ready && it.reg.N > 1 {
				l.stageBackups(it)
			}
		}
		repeat := false
		if l.round.Len() > 0 {
			l.do()
			repeat = l.round.Err() != nil || !l.allFlipped()
			if l.round.Err() != nil {
				if err := l.settle(b.items[0].reg); err != nil {
					for i := range b.items {
						if it := &b.items[i]; it.ready {
							it.ready, errs[it.index] = false, l.unknown(&it.op, err)
						}
					}
				}
			}
		}
		for i := range b.items {
			it := &b.items[i]
			if repeat && it.ready && it.reg.N > 1 {
				if err := l.commitBackups(&it.op, it.ch); err != nil {
					it.ready = false
					l.outcome(it, err, errs)
				}
			}
		}
		l.commitManyPrimaries(b, errs)
	}
	for i, err := range errs {
		if err == errLater {
			errs[i] = l.writeOne(refs[i], payloads[i])
		}
	}
}

func (l *Lane) stageBackups(it *item) {
	_, c := l.chainFor(it.reg.P(), 2)
	l.writeImage(c, &it.op, it.ch)
	for i := 1; i < it.reg.N; i++ {
		_, c := l.chainFor(it.reg.To[i], 4)
		l.writeImage(c, &it.op, it.ch)
		c.CAS(it.slab.VOff(), uint64(it.v), uint64(it.ch.v))
		if it.reg.Durable {
			l.fence(c)
			l.flush(c, it.slab.VOff(), 8)
		}
	}
}

// allFlipped says whether every CAS of the round found what it expected.
func (l *Lane) allFlipped() bool {
	for i := range l.round.Len() {
		for j := range l.round.At(i).Verbs {
			if v := &l.round.At(i).Verbs[j]; v.Op == rdma.CompareSwap && !v.Swapped() {
				return false
			}
		}
	}
	return true
}

func (l *Lane) commitManyPrimaries(b *batch, errs []error) {
	l.round.Reset()
	for i := range b.items {
		it := &b.items[i]
		if !it.ready {
			continue
		}
		var c *rdma.Chain
		it.chain, c = l.chainFor(it.reg.P(), 5)
		if it.reg.N == 1 {
			l.writeImage(c, &it.op, it.ch)
		}
		it.verb = c.CAS(it.slab.VOff(), uint64(it.v), uint64(it.ch.v))
		if it.reg.Durable {
			if it.reg.N == 1 {
				l.fence(c)
			}
			l.flush(c, it.slab.VOff(), 8)
		}
		c.CAS(it.slab.ROff(), uint64(it.r), 0)
		l.fence(c)
	}
	if l.round.Len() == 0 {
		return
	}
	l.do()
	// Outcomes first: the round's storage is used again below.
	for i := range b.items {
		if it := &b.items[i]; it.ready {
			c := l.round.At(it.chain)
			it.broken = c.Err != nil
			it.found = proto.V(c.Verbs[it.verb].Old)
		}
	}
	var settled error
	if l.round.Err() != nil {
		settled = l.settle(b.items[0].reg)
	}
	for i := range b.items {
		it := &b.items[i]
		if !it.ready {
			continue
		}
		switch {
		case it.broken && settled != nil:
			errs[it.index] = l.unknown(&it.op, settled)
		case it.broken:
			l.outcome(it, l.commitDecided(&it.op, it.ch), errs)
		case it.found != it.v && it.found != it.ch.v:
			errs[it.index] = l.alarm(&it.op, fmt.Errorf("primary of %v has V %v, neither %v nor %v", it.ref.Addr, it.found, it.v, it.ch.v))
		default:
			l.halves.expect(&it.op, it.ch.v)
		}
	}
}

// commitDecided finds out whether a commit whose connection is dead has happened,
// and makes it happen if not.
func (l *Lane) commitDecided(o *op, ch change) error {
	done, err := l.primarySettled(o, ch)
	if done || err != nil {
		return err
	}
	return l.commitPrimary(o, ch)
}

// outcome turns the end of a commit into an answer.
func (l *Lane) outcome(it *item, err error, errs []error) {
	switch {
	case err == nil || errors.Is(err, errDone):
		errs[it.index] = nil
	case errors.Is(err, errNotDone):
		errs[it.index] = errLater
	default:
		errs[it.index] = err
	}
}
