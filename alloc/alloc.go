package alloc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file has Allocator and its operations for callers: Alloc, Free, and giving claims back.

var (
	// ErrNoSpace: no region has room for a slab of the class, and none can be made.
	ErrNoSpace = errors.New("no space")
	// ErrTooLarge: no slab is large enough.
	ErrTooLarge = slab.ErrTooLarge
	// ErrStagedReplicas: STAGED slabs were wanted in regions of several replicas.
	ErrStagedReplicas = errors.New("staged slabs need regions with one replica")
)

// Source is what the allocator sees of the cluster beside its lane's Port. The client implements
// it.
type Source interface {
	// Regions lists the open regions of a kind by number, in ascending order. The slice is
	// immutable.
	Regions(h Home) []uint32
	// Grow asks for another region of a kind, unless one with a number above newest exists
	// already. nil: call Regions again. ErrNoSpace: the cluster has no room for another region.
	// Alloc returns any other error as it is.
	Grow(h Home, newest uint32) error
	// Random is a random number. It spreads clients over regions, blocks and words of maps.
	Random() uint64
}

const (
	// claimSlabs is how many slabs one refill claims at most: one word of a map.
	claimSlabs = 64
	// claimBytes bounds the claims of one refill, in bytes.
	claimBytes = 1 << 20
	// shadowSlabs is how many slabs of a shadow block one lane claims at a time: few, so that a block serves many
	// lanes, and several, because a batch needs one for each object that is changed by shadow.
	shadowSlabs = 4
	// magazineSlabs is how many claims a magazine keeps at most.
	magazineSlabs = 2 * claimSlabs
	// MaxHeldBytes bounds the claims of a lane in all its magazines together, without those of
	// the refill under way.
	MaxHeldBytes = 4 << 20
	// maxStale bounds the claims of ended epochs that one Alloc drops before it gives up.
	maxStale = 16
)

// Home is the kind of regions that an object lives in. An object is only put into regions of its
// own kind.
type Home struct {
	Replicas int  // that the region is meant to have
	Durable  bool // acknowledged changes survive the loss of all power
}

func (h Home) String() string {
	if h.Durable {
		return fmt.Sprintf("durable regions with %d replicas", h.Replicas)
	}
	return fmt.Sprintf("regions with %d replicas", h.Replicas)
}

// Want is what a new object needs.
type Want struct {
	Kind     proto.Kind // of its slab
	Capacity int        // largest payload it will ever hold; the payload's length if smaller
	Replicas int
	Durable  bool
	Tag      uint32 // of its images; see proto.ImageHeader
}

// Home is the kind of regions that the object is put into.
func (w *Want) Home() Home { return Home{w.Replicas, w.Durable} }

// Allocator hands out slabs on one lane. It holds claims, in magazines, so that most calls of
// Alloc need no round to find a slab.
//
// All fields belong to the goroutine of the lane; there is no lock.
// Invariant: each claim in a magazine is reserved by this lane's session, in its epoch.
type Allocator struct {
	lane *slab.Lane // carries the rounds; never changes
	src  Source     // never changes

	// mags are the magazines. order lists their keys in the order in which they were made: loops
	// use it, because the simulator needs the same order in each run.
	mags  map[magKey]*magazine
	order []magKey
	held  int // bytes of the slabs of all claims in magazines; see recount
	// surveys has what is known of the blocks of each region, by region number. It may be out of
	// date: every claim READs the block's header.
	surveys map[uint32]*survey
	// cleared are the map bits that this lane has to clear: those of slabs that it has freed, and
	// of claims whose outcome is unknown.
	cleared []clearing

	// Memory that verbs can use. The contents are valid until the next round.
	headers  []byte // the block headers of a region, as READ
	maps     []byte // the free map of a block, as READ
	pairs    []byte // R and V of each slab of a refill
	wordRead []byte // one word of each replica
	block    []byte // a whole block; nil until the first reclaim
}

// magKey names a magazine: the regions, the kind and the size class of its slabs.
type magKey struct {
	home  Home
	kind  proto.Kind
	class proto.Class
	// shadows: the slabs lie in shadow blocks, and no object is put into them.
	shadows bool
}

// magazine holds claimed slabs of one kind of region, slab kind and class.
type magazine struct {
	claims []slab.Claim // Alloc takes the last one, refills append
	at     cursor       // the block that the next refill claims from; empty: none
}

// New makes an allocator on a lane.
func New(l *slab.Lane, src Source) (*Allocator, error) {
	p := l.Port()
	a := &Allocator{lane: l, src: src, mags: map[magKey]*magazine{}, surveys: map[uint32]*survey{}}
	var err1, err2, err3 error
	a.maps, err1 = p.Buffer(proto.MapBytes)
	a.pairs, err2 = p.Buffer(16 * claimSlabs)
	a.wordRead, err3 = p.Buffer(8 * slab.MaxListed)
	l.LendShadows(a)
	return a, errors.Join(err1, err2, err3)
}

// classFor is the smallest size class whose slabs hold the payload. ErrTooLarge: there is none.
func (a *Allocator) classFor(payloadBytes int, k proto.Kind) (proto.Class, error) {
	c, ok := proto.ClassFor(payloadBytes+a.lane.Overhead(), k)
	if !ok {
		return 0, fmt.Errorf("%w: %d bytes, the largest %v slab holds %d", ErrTooLarge, payloadBytes, k, a.lane.MaxPayloadBytes(k))
	}
	return c, nil
}

// magazine returns the magazine of a key, and makes it if there is none.
func (a *Allocator) magazine(k magKey) *magazine {
	m := a.mags[k]
	if m == nil {
		m = &magazine{}
		a.mags[k] = m
		a.order = append(a.order, k)
	}
	return m
}

// Alloc takes a claim and writes an object's first payload into its slab. If the magazine is
// empty a refill costs two rounds. Birth's rounds follow: one with one replica, two with more.
//
// If the best fitting class has no room left, and no further region can be had, a slab of up to
// twice the size is used.
//
// nil: done. slab.ErrUnknown: the object may exist; no reference to it was returned. Any other
// error: not done.
func (a *Allocator) Alloc(payload []byte, w Want) (proto.Ref, error) {
	if w.Kind == proto.Staged && w.Replicas != 1 {
		return proto.Ref{}, fmt.Errorf("%w, not %v", ErrStagedReplicas, w.Home())
	}
	class, err := a.classFor(max(len(payload), w.Capacity), w.Kind)
	if err != nil {
		return proto.Ref{}, err
	}
	ref, err := a.allocAs(class, maxGrow, payload, &w)
	for larger := class + 1; errors.Is(err, ErrNoSpace) && larger <= proto.MaxClass(w.Kind) && larger.Bytes() <= 2*class.Bytes(); larger++ {
		other, err2 := a.allocAs(larger, 0, payload, &w)
		if !errors.Is(err2, ErrNoSpace) {
			return other, err2
		}
	}
	return ref, err
}

// allocAs is Alloc in a slab of a class; grow bounds how many new regions it asks for.
func (a *Allocator) allocAs(class proto.Class, grow int, payload []byte, w *Want) (proto.Ref, error) {
	k := magKey{home: w.Home(), kind: w.Kind, class: class}
	m := a.magazine(k)
	for stale, aside := 0, 0; ; {
		// The first aside claims are in regions that cannot be reached now. They stay
		// claimed, because the regions may come back in the same epoch.
		if len(m.claims) <= aside {
			if err := a.refill(k, m, grow); err != nil {
				return proto.Ref{}, err
			}
			if err := a.lane.Port().Pause(0); err != nil {
				return proto.Ref{}, err // the claims stay in the magazine
			}
			aside = max(0, min(aside, len(m.claims)-1)) // an epoch may have ended some
		}
		c := m.claims[len(m.claims)-1]
		m.claims = m.claims[:len(m.claims)-1]
		a.held -= class.Bytes()
		ref, err := a.lane.Birth(c, payload, w.Tag)
		if unreachable(err) && len(m.claims) < magazineSlabs {
			m.claims = slices.Insert(m.claims, 0, c)
			a.held += class.Bytes()
			aside++
			continue
		}
		if errors.Is(err, slab.ErrNoRegion) {
			a.dropEpoch(c.Reg) // removed, and its slabs with it
			continue
		}
		if errors.Is(err, slab.ErrStaleClaim) {
			a.dropEpoch(c.Reg)
			if stale++; stale < maxStale {
				continue
			}
		} else if err != nil && !errors.Is(err, slab.ErrUnknown) {
			a.put(m, c) // nothing was posted: it is still this lane's
		}
		return ref, err
	}
}

// unreachable reports that a call has changed nothing, because no replica of the region can be
// used. The caller may try another region.
func unreachable(err error) bool {
	return errors.Is(err, slab.ErrUnavailable) && !errors.Is(err, slab.ErrUnknown)
}

// dropEpoch forgets what belongs to an epoch of a region that has ended, or to an earlier one:
// Reconcile has cleared the reservations. Claims of a later epoch are kept.
func (a *Allocator) dropEpoch(over *slab.Region) {
	if s := a.surveys[over.ID]; s != nil && s.epoch <= over.Epoch {
		delete(a.surveys, over.ID)
	}
	gone := func(r *slab.Region) bool {
		return r.ID == over.ID && r.Epoch <= over.Epoch
	}
	for _, k := range a.keys() {
		m := a.mags[k]
		kept := m.claims[:0]
		for _, c := range m.claims {
			if !gone(c.Reg) {
				kept = append(kept, c)
			}
		}
		m.claims = kept
		if m.at.reg != nil && gone(m.at.reg) {
			m.at = cursor{}
		}
	}
	a.recount()
}

// Free ends an object. If the magazine has room the lane keeps the slab as a claim: then neither
// R nor the map bit has to be cleared. Otherwise R is cleared at once, and the map bit later,
// together with others. last is the payload that was freed, in the lane's scratch memory.
//
// Errors: those of slab.Lane.Free.
func (a *Allocator) Free(ref proto.Ref) (last []byte, info slab.Info, err error) {
	return a.free(ref, a.lane.Free)
}

// FreeVersion is Free if the object is still at a version; slab.ErrConflict otherwise.
func (a *Allocator) FreeVersion(ref proto.Ref, version uint64) (last []byte, info slab.Info, err error) {
	return a.free(ref, func(ref proto.Ref, keep bool) (slab.Claim, []byte, slab.Info, error) {
		return a.lane.FreeVersion(ref, version, keep)
	})
}

// FreeBad gives up the object of a slab that is marked BAD; mark is the reference of the mark. The slab is not kept as a claim: its
// memory may be what damaged the object.
//
// Errors: those of slab.Lane.FreeBad.
func (a *Allocator) FreeBad(mark proto.Ref) error {
	_, _, err := a.free(mark, func(mark proto.Ref, _ bool) (slab.Claim, []byte, slab.Info, error) {
		c, err := a.lane.FreeBad(mark)
		return c, nil, slab.Info{}, err
	})
	return err
}

// free is Free by a function that frees the slab and keeps it, or not. To keep it, the block must
// be ACTIVE, because claims in a DRAINING block would stop its reclaim. A slab of the shadow block, where a program of an
// earlier version has put an object, is not kept.
func (a *Allocator) free(ref proto.Ref, free func(ref proto.Ref, keep bool) (slab.Claim, []byte, slab.Info, error)) (last []byte, info slab.Info, err error) {
	keep, home := false, Home{}
	if reg, err := a.lane.Port().Region(ref.Addr.Region()); err == nil {
		home = Home{reg.Replicas(), reg.Durable}
		if b, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off())); ok {
			if h := reg.Headers.Load(b); h != 0 && h.State() == proto.BlockActive && int(b) < objectBlocks(reg) {
				m := a.magazine(magKey{home: home, kind: h.Kind(), class: h.Class()})
				keep = len(m.claims) < a.room(h.Class()) && a.held+h.Class().Bytes() <= MaxHeldBytes
			}
		}
	}
	c, last, info, err := free(ref, keep)
	if err != nil {
		return nil, info, err
	}
	if c.Held {
		a.put(a.magazine(magKey{home: home, kind: c.Slab.Kind, class: c.Slab.Class}), c)
		return last, info, nil
	}
	a.cleared = append(a.cleared, clearing{c.Reg, c.Slab, c.Generation})
	return last, info, nil
}

// Tidy clears the map bits of freed slabs when there are many. The caller calls it between
// operations. The slabs are free already, but searches skip them until their bits are cleared.
func (a *Allocator) Tidy() error {
	if len(a.cleared) < claimSlabs {
		return nil
	}
	return a.flushCleared()
}

// Forget drops the claims and the map bits to clear of regions for which over says that their
// epoch has ended: Reconcile has cleared the reservations and made the maps again.
func (a *Allocator) Forget(over func(*slab.Region) bool) {
	a.cleared = slices.DeleteFunc(a.cleared, func(c clearing) bool { return over(c.reg) })
	for _, k := range a.keys() {
		m := a.mags[k]
		m.claims = slices.DeleteFunc(m.claims, func(c slab.Claim) bool { return over(c.Reg) })
	}
	a.recount()
}

// Idle says that there are no claims and no map bits to clear.
func (a *Allocator) Idle() bool { return len(a.cleared) == 0 && a.Held() == 0 }

// Trim gives all claims back, and clears all map bits. What belongs to regions that cannot be
// used now is kept.
func (a *Allocator) Trim() error {
	var errs []error
	for _, k := range a.keys() {
		m := a.mags[k]
		held, _, err := a.giveBack(m.claims)
		m.claims = held
		errs = append(errs, err)
	}
	a.recount()
	return errors.Join(append(errs, a.flushCleared())...)
}

// Close gives all claims back. If some cannot be given back the session ends, so that the scrub
// frees them. Map bits in regions that cannot be used now are kept: Idle then says false. The
// allocator may be used again.
func (a *Allocator) Close() error {
	var errs []error
	for _, k := range a.keys() {
		m := a.mags[k]
		held, reason, err := a.giveBack(m.claims)
		if len(held) > 0 {
			a.abandonClaims(held[0].Reg, reason)
		}
		m.claims = nil
		errs = append(errs, reason, err)
	}
	a.recount()
	return errors.Join(append(errs, a.flushCleared())...)
}
