package slab

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Limits of one batch round: verbs fit one chain, bytes fit a lane's scratch.
const (
	batchVerbs = rdma.MaxChainVerbs / 2
	// maxWrites bounds the objects of one round of WriteMany.
	maxWrites  = batchVerbs / 2
	batchBytes = 1 << 20
	// localBytes takes the place of batchBytes where this process executes the verbs: rounds cost
	// nothing there, and what was READ stays in the second-level cache until it has been checked
	// and copied.
	localBytes = 256 << 10
)

// batch is the lane's storage for calls with many objects. It is empty between calls; the memory
// is kept.
type batch struct {
	readings []reading   // of one round
	reading  []*reading  // of readings: what the next round READs
	attempts []attempt   // of one round
	held     []*attempt  // of attempts: those that hold their slabs
	retry    []int       // indices of what ReadMany reads by itself
	slabs    []byte      // slabs as READ; verbs use it
	imgs     []byte      // images to WRITE; verbs use it
	rest     []proto.Ref // chunks that ReadChunks could not read in place
	ats      []int       // and where their payloads go
}

// ReadMany reads objects and calls fn at most once for each, in any order, with its payload or
// its error. nil: fn was called for every object. An error: the call has ended before the objects
// for which fn was not called. Payloads are in scratch memory, valid during the call of fn.
//
// One round is for up to 128 objects and 1 MiB of slabs. Another one follows if some objects turn
// out to be in the other half of their slabs. An object that a concurrent writer disturbs is read
// again by itself.
//
// Linearizes at: the READ of each object, as in Read; not all at one instant.
func (l *Lane) ReadMany(refs []proto.Ref, fn func(i int, payload []byte, info Info, err error)) error {
	b := &l.batch
	for next := 0; next < len(refs); {
		if next > 0 {
			if err := l.port.Pause(0); err != nil {
				return err
			}
		}
		next = l.gatherReads(refs, next, fn)
		for len(b.reading) > 0 {
			if err := l.readGathered(fn); err != nil {
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

// gatherReads plans the readings of one round, from refs[next] on. It returns the index of the
// first object that has no room in the round.
func (l *Lane) gatherReads(refs []proto.Ref, next int, fn func(i int, payload []byte, info Info, err error)) int {
	b := &l.batch
	b.readings, b.reading, b.retry = b.readings[:0], b.reading[:0], b.retry[:0]
	for bytes := 0; next < len(refs) && len(b.readings) < batchVerbs; next++ {
		k := reading{index: next}
		switch err := l.resolve(&k.object, refs[next]); {
		case errors.Is(err, errAgain):
			b.retry = append(b.retry, next)
			continue
		case err != nil:
			fn(next, nil, Info{}, err)
			continue
		}
		most := batchBytes
		if k.reg.Local {
			most = localBytes
		}
		if k.planWhole(); k.bytes >= l.halves.from || !k.reg.Local {
			l.planHalf(&k)
		}
		if len(b.readings) > 0 && bytes+k.bytes > most {
			break
		}
		bytes += k.bytes
		b.readings = append(b.readings, k)
	}
	for i := range b.readings {
		b.reading = append(b.reading, &b.readings[i])
	}
	return next
}

// readGathered READs the batch in one round and calls fn for the objects that this answers. On
// return b.reading are those to READ again, whole, and b.retry those to read by themselves.
func (l *Lane) readGathered(fn func(i int, payload []byte, info Info, err error)) error {
	b := &l.batch
	bytes := 0
	for _, k := range b.reading {
		bytes += k.bytes
	}
	buf, err := l.buffer(&b.slabs, bytes)
	if err != nil {
		return err
	}
	for _, k := range b.reading {
		k.buf, buf = buf[:k.bytes], buf[k.bytes:]
	}
	l.readRound(b.reading...)
	lease, reg := l.answer(nil), b.reading[0].reg
	left := b.reading[:0]
	for _, k := range b.reading {
		if k.lost {
			b.retry = append(b.retry, k.index)
			continue
		}
		if l.judgeRead(k); k.open {
			b.retry = append(b.retry, k.index)
			continue
		}
		switch k.state {
		case imageLive:
			payload, info, err := l.shown(k)
			fn(k.index, payload, info, cmp.Or(lease, err))
		case imageFreed:
			fn(k.index, nil, Info{}, l.answer(ErrFreed))
		case imageElsewhere:
			k.planWhole()
			left = append(left, k)
		default:
			b.retry = append(b.retry, k.index)
		}
	}
	b.reading = left
	if l.round.Err() == nil {
		return nil
	}
	// The table may have changed: everything that is left starts again.
	for _, k := range left {
		b.retry = append(b.retry, k.index)
	}
	b.reading = left[:0]
	if err = l.settle(reg); err != nil {
		for _, i := range b.retry {
			fn(i, nil, Info{}, err)
		}
	}
	return err
}

// WriteMany replaces the payloads of objects; errs[i] is the answer for refs[i], as that of
// Update. Two rounds, three with backups, for up to 64 objects and 1 MiB; for 51 objects if the
// region is durable or the slabs are STAGED, for 28 if both. An object that another session holds
// is written by itself afterwards, so that no client waits for one object while it holds another.
//
// Linearizes at: the CAS of V of each object, as in Update; not all at one instant.
func (l *Lane) WriteMany(refs []proto.Ref, payloads [][]byte, errs []error) {
	l.inBatches(errs[:len(refs)], func(from int) int {
		next, imgs := l.gather(refs, from, false, func(i int, s proto.Slab) (int, error) {
			return proto.ImageLen(len(payloads[i]) + l.Overhead()), l.fits(len(payloads[i]), s)
		}, errs)
		l.changeGathered(imgs, func() { l.stageHeld(payloads, errs) }, errs)
		l.oneByOne(from, next, func(i int) error { return l.writeOne(refs[i], payloads[i]) }, errs)
		return next
	})
}

// ErrIndex: WriteMany left the object alone because it is an index; see proto.TagIndex.
var ErrIndex = errors.New("object is an index")

// inBatches has all objects changed, batch by batch: batch changes those from an index on, as many as fit, and returns the index of the first
// that did not. The objects behind a deadline that passes between two batches have its error.
func (l *Lane) inBatches(errs []error, batch func(from int) (next int)) {
	for next := 0; next < len(errs); {
		if next > 0 {
			if err := l.port.Pause(0); err != nil {
				for i := next; i < len(errs); i++ {
					errs[i] = err
				}
				return
			}
		}
		next = batch(next)
	}
}

// changeGathered reserves the slabs of the batch's attempts, has stage build the images of those in b.held, and commits these. An object
// that the batch could not change, and that is to be changed by itself, has errAgain.
func (l *Lane) changeGathered(imgs int, stage func(), errs []error) {
	b := &l.batch
	b.held = b.held[:0]
	if l.reserveGathered(imgs, errs); len(b.held) == 0 {
		return
	}
	stage()
	l.commit(b.held...)
	for _, a := range b.held {
		errs[a.index] = a.answer()
	}
}

// oneByOne changes those of the objects from an index on, up to next, that the batch has left over.
func (l *Lane) oneByOne(from, next int, change func(i int) error, errs []error) {
	for i := from; i < next; i++ {
		if errs[i] != errAgain {
			continue
		}
		if errs[i] = l.port.Pause(0); errs[i] == nil {
			errs[i] = change(i)
		}
	}
}

// writeOne writes an object that the batch could not take along.
func (l *Lane) writeOne(ref proto.Ref, payload []byte) error {
	_, err := l.Overwrite(ref, func(_ []byte, info *Info) ([]byte, error) {
		if info.Tag&proto.TagIndex != 0 {
			return nil, ErrIndex
		}
		return payload, nil
	})
	return err
}

// verbsOfWrite is the most verbs that a commit posts to one target for the object.
func (o *object) verbsOfWrite() int {
	switch {
	case o.slab.Kind == proto.Staged && o.reg.Durable:
		return 9 // WRITE, FLUSH of record and L, CAS V, FLUSH, WRITE, FLUSH of home, CAS R
	case o.slab.Kind == proto.Staged || o.reg.Durable:
		return 5 // WRITE, FLUSH, CAS V, FLUSH, CAS R; or the WRITEs of record, L and home, and both CAS
	}
	return 3
}

// gather makes attempts for objects from refs[from] on, as many as fit one batch. image returns how many bytes the new image of object i may
// take, or why there is none. The objects before next have an attempt or an error; imgs is how many bytes the images and records take.
func (l *Lane) gather(refs []proto.Ref, from int, byHalf bool, image func(i int, s proto.Slab) (int, error), errs []error) (next, imgs int) {
	b := &l.batch
	b.attempts = b.attempts[:0]
	bytes, verbs := 0, 0
	for next = from; next < len(refs) && len(b.attempts) < maxWrites; next++ {
		a := attempt{index: next, byHalf: byHalf}
		img := 0
		err := l.resolve(&a.object, refs[next])
		switch {
		case err != nil:
		case a.slab.Kind == proto.Single:
			err = fmt.Errorf("%w: %v", ErrImmutable, refs[next])
		default:
			img, err = image(next, a.slab)
		}
		if errs[next] = err; err != nil {
			continue
		}
		size := a.slab.Class.Bytes()
		if len(b.attempts) > 0 && (a.commitsOpen() != b.attempts[0].commitsOpen() || bytes+size > batchBytes || verbs+a.verbsOfWrite() > rdma.MaxChainVerbs) {
			break
		}
		bytes += size
		verbs += a.verbsOfWrite()
		imgs += img + redoBytes(a.slab)
		b.attempts = append(b.attempts, a)
	}
	return next, imgs
}

// reserveGathered reserves the slabs of the batch's attempts in one round. b.held are the
// attempts that hold their slabs afterwards; the others have an error in errs.
func (l *Lane) reserveGathered(imgs int, errs []error) {
	b := &l.batch
	bytes := 0
	for i := range b.attempts {
		bytes += b.attempts[i].slab.Class.Bytes()
	}
	slabs, err1 := l.buffer(&b.slabs, bytes)
	_, err2 := l.buffer(&b.imgs, imgs)
	if err := errors.Join(err1, err2); err != nil {
		for i := range b.attempts {
			errs[b.attempts[i].index] = err
		}
		return
	}
	for i := range b.attempts {
		a := &b.attempts[i]
		size := a.slab.Class.Bytes()
		a.off, a.seen, slabs = a.slab.Off, slabs[:size], slabs[size:]
		l.expectPart(a)
		b.held = append(b.held, a)
	}
	if len(b.held) == 0 {
		return
	}
	all := b.held
	b.held = b.held[:0]
	l.reserveRound(all...)
	if l.round.Err() != nil {
		if err := l.settle(all[0].reg); err != nil {
			for _, a := range all {
				errs[a.index] = err
			}
			_ = l.abandon(all[0], err)
			return
		}
	}
	for _, a := range all {
		switch {
		case a.lost:
			errs[a.index] = l.releaseLost(a)
		case a.holder != 0:
			errs[a.index] = errAgain
		default:
			b.held = append(b.held, a)
		}
	}
}

// stageHeld builds the images for the slabs that the batch holds. A slab that it cannot write is
// released and taken out of b.held.
func (l *Lane) stageHeld(payloads [][]byte, errs []error) {
	b := &l.batch
	imgs, all := b.imgs, b.held
	b.held = b.held[:0]
	for _, a := range all {
		payload := payloads[a.index]
		err := l.judge(a)
		if err == nil && a.header.Tag >= l.unclear {
			if _, err = l.admit(&a.object, &a.sight); err != nil {
				err = l.releaseFor(a, err)
			}
		}
		switch {
		case err == errDamaged:
			err = errAgain // Update repairs it
		case err == nil && a.header.Tag&proto.TagIndex != 0:
			err = l.releaseFor(a, ErrIndex)
		case err == nil:
			imgs, err = l.stageOne(a, imgs, payload)
		}
		if errs[a.index] = err; err == nil {
			b.held = append(b.held, a)
		}
	}
}

// stageOne builds the new image of a slab that the batch holds in front of space, and its record. It returns the space behind. After an
// error the slab is released.
func (l *Lane) stageOne(a *attempt, space, payload []byte) ([]byte, error) {
	size := proto.ImageLen(len(payload) + l.Overhead())
	a.header.Writer, a.encryption = a.r, l.encryption
	err := stageImage(a, space[:size], &a.header, payload)
	if err == nil {
		err = l.stageRedo(a, space[size:], l.batch.held)
	}
	switch {
	case err == ErrNoShadow:
		return space, l.releaseFor(a, errAgain) // Update claims one
	case err != nil:
		return space, l.releaseFor(a, err)
	}
	return space[size+redoBytes(a.slab):], nil
}
