package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// change is one step of a slab from the version held to the next.
type change struct {
	v    proto.V // the new V
	at   uint64  // where the image goes
	img  []byte  // sealed image; nil for a tombstone
	keep bool    // keep the reservation
}

// errNotDone: after a change of epoch the commit turned out not to have happened.
var errNotDone = errors.New("not done")

// commit makes a change under the reservation o.r: backups first, then the
// primary, steps 2 and 3 of Update, Birth and Free.
//
// Linearizes at: the CAS of V at the primary.
//
// It returns nil, errNotDone (the epoch changed and the change lost: nothing is
// held), or ErrUnknown.
func (l *Lane) commit(o *op, ch change) error {
	if o.reg.N > 1 && !bug(BugPrimaryFirst) {
		if err := l.commitBackups(o, ch); err != nil {
			return err
		}
	}
	if err := l.commitPrimary(o, ch); err != nil {
		return err
	}
	if o.reg.N > 1 && bug(BugPrimaryFirst) {
		return l.commitBackups(o, ch)
	}
	return nil
}

// commitBackups is step 2 with R > 1: the image to all, the flip to the backups.
// Repeating it is safe: a CAS that finds its own new value counts as done.
func (l *Lane) commitBackups(o *op, ch change) error {
	force := [MaxReplicas]proto.V{} // what a joiner's V was found to be
	for i := range force {
		force[i] = o.v
	}
	for tries := 1; ; tries++ {
		l.round.Reset()
		if c := l.round.Chain(o.reg.P()); ch.img != nil && !bug(BugPrimaryFirst) {
			l.writeImage(c, o, ch)
		}
		for i := 1; i < o.reg.N; i++ {
			c := l.round.Chain(o.reg.To[i])
			if bug(BugSkipBackup) && i == o.reg.N-1 || bug(BugIgnoreJoiner) && o.reg.Rebuilding[i] {
				continue
			}
			if bug(BugFlipBeforeImage) {
				c.CAS(o.slab.VOff(), uint64(force[i]), uint64(ch.v))
			}
			l.writeImage(c, o, ch)
			if !bug(BugBackupUnflipped) && !bug(BugFlipBeforeImage) {
				c.CAS(o.slab.VOff(), uint64(force[i]), uint64(ch.v))
				if o.reg.Durable && ch.img != nil {
					l.fence(c)
				}
			}
			if o.reg.Durable {
				l.flush(c, o.slab.VOff(), 8)
			}
		}
		l.do()
		if err := l.round.Err(); err != nil {
			if err := l.afterFailure(o, ch); err != nil {
				return err
			}
			continue
		}
		missed := false
		for i := 1; i < o.reg.N; i++ {
			old, ok := flipped(l.round.At(i))
			switch {
			case ok:
			case !o.reg.Rebuilding[i]:
				return l.alarm(o, fmt.Errorf("backup %d of %v has V %v, neither %v nor %v", i, o.ref.Addr, proto.V(old), o.v, ch.v))
			case !bug(BugJoinerUnforced) && (proto.V(old).Version() < ch.v.Version()):
				// A joiner is moved forward from whatever it has.
				force[i], missed = proto.V(old), true
			}
		}
		if !missed {
			return nil
		}
	}
}

// flipped finds the CAS of V in a backup's chain.
func flipped(c *rdma.Chain) (old uint64, ok bool) {
	for i := range c.Verbs {
		if v := &c.Verbs[i]; v.Op == rdma.CompareSwap {
			return v.Old, v.Swapped()
		}
	}
	return 0, true
}

// commitPrimary is step 3: V, then R. With R = 1 the image rides in the chain.
func (l *Lane) commitPrimary(o *op, ch change) error {
	for {
		l.round.Reset()
		c := l.round.Chain(o.reg.P())
		if o.reg.N == 1 || bug(BugPrimaryFirst) {
			l.writeImage(c, o, ch)
		}
		if bug(BugReleaseEarly) && !ch.keep {
			c.CAS(o.slab.ROff(), uint64(o.r), 0)
		}
		flip := c.CAS(o.slab.VOff(), uint64(o.v), uint64(ch.v))
		if o.reg.Durable && o.reg.N == 1 && ch.img != nil {
			l.fence(c)
		}
		if o.reg.Durable {
			l.flush(c, o.slab.VOff(), 8)
		}
		if !ch.keep && !bug(BugReleaseEarly) {
			c.CAS(o.slab.ROff(), uint64(o.r), 0)
			l.fence(c)
		}
		l.do()
		if c.Err != nil {
			done, err := l.primaryUnknown(o, ch)
			if done || err != nil {
				return err
			}
			continue
		}
		if f := &c.Verbs[flip]; !f.Swapped() {
			return l.alarm(o, fmt.Errorf("primary of %v has V %v, neither %v nor %v", o.ref.Addr, proto.V(f.Old), o.v, ch.v))
		}
		l.halves.expect(o, ch.v)
		return nil
	}
}

// primaryUnknown decides step 3 after a lost completion. The connection is dead
// by then, so R and V stand still unless somebody else owns the slab.
func (l *Lane) primaryUnknown(o *op, ch change) (done bool, err error) {
	if bug(BugAnswerTrusted) {
		return true, nil
	}
	if err := l.afterFailure(o, ch); err != nil {
		return err == errDone, ignoreDone(err)
	}
	return l.primarySettled(o, ch)
}

func ignoreDone(err error) error {
	if err == errDone {
		return nil
	}
	return err
}

// primarySettled is primaryUnknown once the failed round has been settled.
func (l *Lane) primarySettled(o *op, ch change) (done bool, err error) {
	if l.epochOver(o) {
		err := l.readBack(o, ch)
		return err == errDone, ignoreDone(err)
	}
	for l.readWords(o) != nil {
		if err := l.afterFailure(o, ch); err != nil {
			return err == errDone, ignoreDone(err)
		}
	}
	r, v := l.primaryWords()
	switch {
	case r != o.r && !ch.keep:
		return true, nil // released, so V had been committed before
	case r != o.r:
		return false, l.alarm(o, fmt.Errorf("reservation of %v is held by %v", o.ref.Addr, r))
	case v != ch.v:
		return false, nil // not yet: repeat
	}
	// Committed, but the chain may have been cut short between the CAS of V and its
	// FLUSH: what is answered must not be lost with the power.
	if o.reg.Durable {
		if err := l.flushPrimary(o, ch); err != nil {
			return err == errDone, ignoreDone(err)
		}
	}
	if !ch.keep {
		_ = l.release(o) // can be left to fence and scrub
	}
	return true, nil
}

// flushPrimary makes V of the primary persistent.
func (l *Lane) flushPrimary(o *op, ch change) error {
	for {
		l.round.Reset()
		l.flush(l.round.Chain(o.reg.P()), o.slab.VOff(), 8)
		l.do()
		if l.round.Err() == nil {
			return nil
		}
		if err := l.afterFailure(o, ch); err != nil {
			return err
		}
	}
}

// errDone: a read-back under a new epoch found the change in place. Internal.
var errDone = errors.New("done")

// afterFailure settles a failed round of a commit. nil: same epoch, repeat.
// Otherwise the outcome is read back under the new epoch.
func (l *Lane) afterFailure(o *op, ch change) error {
	if err := l.settle(o.reg); err != nil {
		return l.unknown(o, err)
	}
	if !l.epochOver(o) {
		return nil
	}
	return l.readBack(o, ch)
}

// readBack decides a commit that was cut short by a change of epoch. The keys of
// the old epoch are dead and reservations cleared: the change happened for
// everyone or for no one.
func (l *Lane) readBack(o *op, ch change) error {
	for {
		reg, err := l.port.Region(o.reg.ID)
		if err != nil {
			return l.lost(err)
		}
		o.reg = reg
		s, err := l.locate(reg, o.ref)
		switch {
		case errors.Is(err, errAgain):
			continue
		case err != nil:
			return l.lost(err)
		}
		o.slab = s
		buf, err := l.buffer(&l.slab, s.Class.Bytes())
		if err != nil {
			return l.lost(err)
		}
		l.round.Reset()
		l.round.Chain(reg.P()).Read(s.Off, buf)
		l.do()
		if l.round.Err() != nil {
			if err := l.settle(reg); err != nil {
				return l.lost(err)
			}
			continue
		}
		_, v := s.Words(buf)
		if v == o.v {
			return errNotDone
		}
		if v == ch.v && ch.img != nil {
			img := s.Image(buf, v.Version())
			if h, _, ok := proto.OpenImage(img, o.seed); ok && h.Version == v.Version() && h.Writer == o.r && l.answer(nil) == nil {
				return errDone
			}
		}
		return l.lost(errors.New("others have written since"))
	}
}

// lost is an outcome that cannot be told any more although nothing is pending.
func (l *Lane) lost(err error) error { return fmt.Errorf("%w (%w)", ErrUnknown, err) }

// unknown is an outcome with verbs still pending: the session ends.
func (l *Lane) unknown(o *op, err error) error {
	if !bug(BugUnsettledSession) {
		l.port.EndSession(fmt.Errorf("commit of %v could not be settled: %w", o.ref.Addr, err))
	}
	return l.lost(err)
}

// alarm: a flip found what cannot be. Stop, say so, touch nothing more.
func (l *Lane) alarm(o *op, err error) error {
	l.port.EndSession(fmt.Errorf("invariant broken: %w", err))
	return l.lost(err)
}

func (l *Lane) writeImage(c *rdma.Chain, o *op, ch change) {
	if ch.img == nil {
		return
	}
	c.Write(ch.at, ch.img)
	if o.reg.Durable {
		l.flush(c, ch.at, uint64(len(ch.img)))
	}
}

// flush appends a FLUSH ordered behind what it flushes.
func (l *Lane) flush(c *rdma.Chain, off, bytes uint64) {
	if bug(BugFlushNothing) {
		return
	}
	atomicBefore := len(c.Verbs) > 0 && c.Verbs[len(c.Verbs)-1].Op != rdma.Write
	c.Flush(flushKind, off, bytes)
	if atomicBefore {
		l.fence(c)
	}
}

func (l *Lane) fence(c *rdma.Chain) {
	if !bug(BugFenceFlagMissing) {
		c.Fenced()
	}
}
