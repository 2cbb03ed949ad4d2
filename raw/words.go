package raw

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// This file has changes of words: see the package comment.

// change says what becomes of a word: next is its new value from the present one; ok is false if it stays.
type change struct {
	store  bool   // whatever the word is, it becomes value
	swap   bool   // it becomes value if it is expect
	expect uint64 // of a swap; of a store what the word was last found to be, 0 at first
	value  uint64 // or the addend
	found  bool   // a store has found the word to be expect
}

func (c *change) next(old uint64) (next uint64, ok bool) {
	switch {
	case c.store:
		return c.value, true
	case c.swap:
		return c.value, old == c.expect
	}
	return old + c.value, true
}

// unaligned is the error of an address that is not that of a word.
func unaligned(region uint32, off uint64) error {
	return fmt.Errorf("word at %#x of the data of region %d: %w", off-proto.RawDataOff, region, ErrUnaligned)
}

// Load READs a word. In a durable region it answers when the value is on stable storage at the primary: see the package comment.
func (l *Lane) Load(region uint32, off uint64) (uint64, error) {
	if off%8 != 0 {
		return 0, unaligned(region, off)
	}
	b, held := l.words[:8], l.words[8:16]
	clear(held)
	pieces := l.Pieces(1)
	pieces[0] = Piece{region, off, b}
	err := l.read(pieces, func(r *rdma.Round, reg *slab.Region) {
		switch c := r.At(0); {
		case !reg.Durable:
		case reg.N == 1:
			flush(reg, c, off, 8)
		default:
			c.Read(proto.RawWordOff(off), held) // behind the word
		}
	})
	v := proto.Word(b, 0)
	if err == nil && proto.Word(held, 0) != 0 {
		// The holder may not have flushed its WRITE yet.
		if err = l.Flush(region, off, 8); err == nil {
			err = l.answer()
		}
	}
	l.forget()
	return v, err
}

// Store sets a word. slab.ErrUnknown: it may have been set, once.
func (l *Lane) Store(region uint32, off, value uint64) error {
	_, err := l.change(region, off, change{store: true, value: value})
	return err
}

// CompareAndSwap sets a word to value if it is expect, and returns what it was. slab.ErrUnknown: it may have been set, once.
func (l *Lane) CompareAndSwap(region uint32, off, expect, value uint64) (old uint64, err error) {
	return l.change(region, off, change{swap: true, expect: expect, value: value})
}

// Add adds to a word, modulo 2^64, and returns what it was. slab.ErrUnknown: it may have been added, once.
func (l *Lane) Add(region uint32, off, addend uint64) (old uint64, err error) {
	return l.change(region, off, change{value: addend})
}

// change changes a word.
func (l *Lane) change(region uint32, off uint64, c change) (old uint64, err error) {
	if off%8 != 0 {
		return 0, unaligned(region, off)
	}
	me := proto.RawR(0)
	for attempt := 1; ; attempt++ {
		reg, err := l.region(region, off, 8)
		if err == nil {
			err = writable([]*slab.Region{reg})
		}
		if err != nil {
			return 0, err
		}
		if me == 0 && reg.N > 1 {
			me = l.reservation(off)
		}
		var again bool
		if reg.N == 1 {
			old, again, err = l.changeAlone(reg, off, &c)
		} else {
			old, again, err = l.changeAll(reg, off, me, attempt, &c)
		}
		if err != nil || !again {
			return old, err
		}
		if err := l.port.Pause(attempt); err != nil {
			return 0, err
		}
	}
}

// reservation is a new reservation of the word at off.
func (l *Lane) reservation(off uint64) proto.RawR {
	r := l.port.Reservation()
	return proto.MakeRawR(r.Session(), uint32(r.Sequence()>>(proto.SequenceBits-8)), r.Sequence(), off)
}

// changeAlone changes a word of a region with one replica, by atomics alone: an adapter's are not atomic against WRITEs. A store is a
// CAS from what the CAS before has found. again: nothing was done.
func (l *Lane) changeAlone(reg *slab.Region, off uint64, c *change) (old uint64, again bool, _ error) {
	r := l.lane.Round()
	r.Reset()
	ch := r.Chain(reg.P())
	if c.store || c.swap {
		ch.CAS(off, c.expect, c.value)
	} else {
		ch.FetchAdd(off, c.value)
	}
	flush(reg, ch, off, 8)
	l.lane.Do()
	if err := ch.Err; err != nil {
		if isRefused(ch) {
			return 0, true, l.lane.Settle(reg)
		}
		if serr := l.settleChange(reg); serr != nil {
			err = serr
		}
		return 0, false, fmt.Errorf("%w: word at %#x of the data of region %d: %w", slab.ErrUnknown, off-proto.RawDataOff, reg.ID, err)
	}
	switch old = ch.Verbs[0].Old; {
	case old == c.expect || !c.store && !c.swap:
		return old, false, nil
	case c.swap:
		return old, false, l.answer()
	}
	first := !c.found
	if c.expect, c.found = old, true; first {
		return l.changeAlone(reg, off, c)
	}
	return 0, true, nil
}

// isRefused says whether the node has refused a chain before any of it ran.
func isRefused(c *rdma.Chain) bool { return c.Done == 0 && refusal(c.Err) }

// changeAll changes a word of a region with several replicas. again: nothing was done, and nothing is held.
func (l *Lane) changeAll(reg *slab.Region, off uint64, me proto.RawR, attempt int, c *change) (old uint64, again bool, err error) {
	holder, old, again, err := l.reserve(reg, off, me)
	if err != nil || again {
		return 0, again, err
	}
	if holder != 0 {
		if l.port.HolderFenced(reg.ID, holder.Session(), attempt) {
			err = l.takeOver(reg, holder, me)
		}
		return 0, true, err // the caller's change has not begun
	}
	next, ok := c.next(old)
	if !ok {
		if err := l.release(reg, me); err != nil {
			return 0, false, err
		}
		return old, false, l.answer()
	}
	old, err = l.commit(reg, off, me, old, next)
	return old, false, err
}

// reserve reserves a word at the primary and READs it. holder: the reservation that is there already. again: the round was refused or had
// no answer, and nothing is held.
func (l *Lane) reserve(reg *slab.Region, off uint64, me proto.RawR) (holder proto.RawR, old uint64, again bool, _ error) {
	r := l.lane.Round()
	r.Reset()
	ch := r.Chain(reg.P())
	cas := ch.CAS(proto.RawWordOff(off), 0, uint64(me))
	ch.Read(off, l.words[:8])
	ch.Fenced()
	l.lane.Do()
	if r.Err() != nil {
		if isRefused(ch) {
			return 0, 0, true, l.lane.Settle(reg)
		}
		if err := l.settleChange(reg); err != nil {
			return 0, 0, false, err // the word is as it was
		}
		// It may be held: it must not outlive the call.
		return 0, 0, true, l.release(reg, me)
	}
	if v := &ch.Verbs[cas]; !v.Swapped() {
		return proto.RawR(v.Old), 0, false, nil
	}
	return 0, proto.Word(l.words, 0), false, nil
}

// errEpoch: the region has another configuration, or is gone.
var errEpoch = errors.New("the region has changed its configuration meanwhile")

// commit writes a word that is reserved to all replicas and releases it.
func (l *Lane) commit(reg *slab.Region, off uint64, me proto.RawR, old, next uint64) (uint64, error) {
	over := func(err error) (uint64, error) {
		if err == nil {
			err = errEpoch
		}
		return 0, fmt.Errorf("%w: change of the word at %#x of the data of region %d: %w", slab.ErrUnknown, off-proto.RawDataOff, reg.ID, err)
	}
	b := l.words[8*slab.MaxListed:][:8]
	proto.PutWord(b, 0, next)
	if ended, err := l.insist(reg, func(r *rdma.Round) { l.putWord(r, reg, off, b, false) }); ended || err != nil {
		return over(err)
	}
	// With a replica that is being rebuilt the reservation is held until that one has the word, too.
	joint := !rebuilds(reg)
	for {
		r := l.lane.Round()
		r.Reset()
		ch := r.Chain(reg.P())
		ch.Write(off, b)
		flush(reg, ch, off, 8)
		if joint {
			ch.CAS(proto.RawWordOff(off), uint64(me), 0)
			if reg.Durable {
				ch.Fenced() // behind the FLUSH
			}
		}
		l.lane.Do()
		if r.Err() == nil {
			break
		}
		ended, err := l.settleIn(reg)
		if ended || err != nil {
			return over(err)
		}
		if joint {
			held, ended, err := l.holds(reg, off, me)
			if ended || err != nil {
				return over(err)
			}
			if !held {
				break // the chain ran to its end
			}
		}
	}
	if !joint {
		ended, err := l.insist(reg, func(r *rdma.Round) { l.putWord(r, reg, off, b, true) })
		if ended || err != nil {
			return over(err)
		}
		if err := l.release(reg, me); err != nil {
			return over(err)
		}
	}
	return old, nil // No lease check: all in-sync replicas accepted the change in this epoch.
}

// putWord appends the WRITEs of a word to the backups in sync, or to the replicas that are being rebuilt.
func (l *Lane) putWord(r *rdma.Round, reg *slab.Region, off uint64, b []byte, rebuilding bool) {
	for k := 1; k < reg.N; k++ {
		if reg.Rebuilding[k] == rebuilding {
			c := r.Chain(reg.To[k])
			c.Write(off, b)
			flush(reg, c, off, 8)
		}
	}
}

// rebuilds says whether a replica is being rebuilt.
func rebuilds(reg *slab.Region) bool {
	for k := range reg.N {
		if reg.Rebuilding[k] {
			return true
		}
	}
	return false
}

// holds says whether the reservation of the word at off is still me. ended: the epoch is over.
func (l *Lane) holds(reg *slab.Region, off uint64, me proto.RawR) (held, ended bool, err error) {
	ended, err = l.insist(reg, func(r *rdma.Round) { r.Chain(reg.P()).Read(proto.RawWordOff(off), l.words[:8]) })
	return proto.RawR(proto.Word(l.words, 0)) == me, ended, err
}

// release gives a reservation back. nil: it does not name me any more, or the epoch is over.
func (l *Lane) release(reg *slab.Region, me proto.RawR) error {
	_, err := l.insist(reg, func(r *rdma.Round) { r.Chain(reg.P()).CAS(proto.RawWordOff(me.Off()), uint64(me), 0) })
	return err
}

// takeOver takes the reservation of a session over that is fenced in the region, makes the word alike at all replicas, and releases it.
func (l *Lane) takeOver(reg *slab.Region, dead, me proto.RawR) error {
	off := dead.Off()
	me = me.Of(off)
	swapped := false
	ended, err := l.insist(reg, func(r *rdma.Round) {
		c := r.Chain(reg.P())
		c.CAS(proto.RawWordOff(off), uint64(dead), uint64(me))
		c.Read(off, l.words[:8])
		c.Fenced()
		flush(reg, c, off, 8) // the dead session's WRITE may have been without its FLUSH
	})
	if !ended && err == nil {
		swapped = l.lane.Round().At(0).Verbs[0].Swapped()
	}
	if ended || err != nil || !swapped {
		return err
	}
	b := l.words[8*slab.MaxListed:][:8]
	copy(b, l.words[:8])
	for _, rebuilding := range []bool{false, true} {
		if ended, err := l.insist(reg, func(r *rdma.Round) { l.putWord(r, reg, off, b, rebuilding) }); ended || err != nil {
			return err
		}
	}
	return l.release(reg, me)
}

// insist sends a round until it is answered. ended: the epoch is over, and nothing of it runs any more. If it returns an error it has
// ended the session.
func (l *Lane) insist(reg *slab.Region, build func(r *rdma.Round)) (ended bool, _ error) {
	for {
		r := l.lane.Round()
		r.Reset()
		build(r)
		if r.Len() == 0 {
			return false, nil
		}
		l.lane.Do()
		if r.Err() == nil {
			return false, nil
		}
		if ended, err := l.settleIn(reg); ended || err != nil {
			return ended, err
		}
	}
}

// settleIn settles the last round. ended: the region has another epoch, or is gone with its reservations.
func (l *Lane) settleIn(reg *slab.Region) (ended bool, _ error) {
	if err := l.settleChange(reg); err != nil {
		return false, err
	}
	now, err := l.port.Region(reg.ID)
	if errors.Is(err, slab.ErrNoRegion) {
		return true, nil
	}
	if err != nil {
		l.lane.EndSession(fmt.Errorf("a word of region %d is reserved: %w", reg.ID, err))
		return false, err
	}
	return now.Epoch != reg.Epoch, nil
}

// ScrubWords takes over the reservations of dead sessions, whose numbers may be given again behind it.
// Preconditions: dead sessions are fenced everywhere.
func (l *Lane) ScrubWords(reg *slab.Region, dead func(session uint32) bool) (taken int, err error) {
	b, err := l.buffer(0)
	if err != nil {
		return 0, err
	}
	b = b[:8*proto.RawWords]
	ended, err := l.insist(reg, func(r *rdma.Round) { r.Chain(reg.P()).Read(proto.RawWordsOff, b) })
	if ended && err == nil {
		err = slab.ErrEpochOver
	}
	for i := 0; i < proto.RawWords && err == nil; i++ {
		if w := proto.RawR(proto.Word(b, 8*i)); w != 0 && dead(w.Session()) {
			taken++
			err = l.takeOver(reg, w, l.reservation(w.Off()))
		}
	}
	if err == nil {
		err = l.answer() // a primary that was replaced meanwhile says nothing of the present one
	}
	return taken, err
}
