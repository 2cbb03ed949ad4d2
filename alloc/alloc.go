package alloc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

var (
	// ErrNoSpace: no region has room for a slab of the class, and none can be made.
	ErrNoSpace = errors.New("no space")
	// ErrTooLarge: no slab is large enough.
	ErrTooLarge = slab.ErrTooLarge
	// ErrStagedReplicas: STAGED slabs were wanted in regions of several replicas.
	ErrStagedReplicas = errors.New("staged slabs need regions with one replica")
)

// Source is what the allocator sees of the cluster.
type Source interface {
	// Regions lists the open regions of a kind, in ascending order. The slice is immutable.
	Regions(h Home) []uint32
	// Grow asks for another region of a kind, unless one with a higher number than newest
	// exists already. nil: call Regions again. ErrNoSpace: the cluster has no room for
	// another region. Alloc returns any other error as it is.
	Grow(h Home, newest uint32) error
	// Random is a random number, for spreading clients over regions and words.
	Random() uint64
}

const (
	// claimSlabs is how many slabs one refill claims at most: one word of a map.
	claimSlabs = 64
	// claimBytes bounds a refill of large slabs.
	claimBytes = 1 << 20
	// magazineSlabs is how many claims of a kind and class a lane keeps.
	magazineSlabs = 2 * claimSlabs
	// MaxHeldBytes bounds the claims of a lane in all magazines, beside those of the last refill.
	MaxHeldBytes = 4 << 20
	// maxStale bounds the claims of earlier epochs that one Alloc drops.
	maxStale = 16
)

// Home is the kind of regions that an object lives in. Objects of one kind never use room
// in regions of another.
type Home struct {
	Replicas int
	Durable  bool // acknowledged changes survive the loss of all power
}

func (h Home) String() string {
	if h.Durable {
		return fmt.Sprintf("durable regions with %d replicas", h.Replicas)
	}
	return fmt.Sprintf("regions with %d replicas", h.Replicas)
}

// Want is what an object needs.
type Want struct {
	Kind     proto.Kind
	Capacity int // largest payload it will ever hold; the payload's length if smaller
	Replicas int
	Durable  bool
	Tag      uint32
}

// Home is the kind of regions for it.
func (w *Want) Home() Home { return Home{w.Replicas, w.Durable} }

// Allocator hands out slabs on one lane. All fields belong to the lane's goroutine.
type Allocator struct {
	lane *slab.Lane
	src  Source

	// mags are the magazines, and order lists their keys as they were made: the simulator
	// needs the same order in each run.
	mags  map[magKey]*magazine
	order []magKey
	held  int // bytes of the claims in all magazines
	// surveys has what is known of the blocks of each region, by region number.
	surveys map[uint32]*survey
	// cleared are map bits to clear: of slabs that were freed, and of claims with an
	// unknown outcome.
	cleared []clearing

	// Memory that verbs can use, valid until the next round.
	headers  []byte // the block headers of a region, as READ
	maps     []byte // the map of a block, as READ
	pairs    []byte // R and V of each slab of a refill
	wordRead []byte // one word of each replica
	block    []byte // a whole block, nil until something is reclaimed
}

type magKey struct {
	home  Home
	kind  proto.Kind
	class proto.Class
}

// magazine holds claimed slabs of one kind of region, slab kind and class.
type magazine struct {
	claims []slab.Claim
	at     cursor // the block that is claimed from
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

// classFor is the size class of an object, best fit.
func (a *Allocator) classFor(payloadBytes int, k proto.Kind) (proto.Class, error) {
	c, ok := proto.ClassFor(payloadBytes+a.lane.Overhead(), k)
	if !ok {
		return 0, fmt.Errorf("%w: %d bytes, the largest %v slab holds %d", ErrTooLarge, payloadBytes, k, a.lane.MaxPayloadBytes(k))
	}
	return c, nil
}

func (a *Allocator) magazine(k magKey) *magazine {
	m := a.mags[k]
	if m == nil {
		m = &magazine{}
		a.mags[k] = m
		a.order = append(a.order, k)
	}
	return m
}

// Alloc claims a slab and writes its first payload. A claim from the magazine costs no
// round; a refill costs two. Birth's rounds follow. Where there is no room left for the
// class of best fit, and no further region can be had, a free slab of up to twice its size
// serves.
//
// nil: done. slab.ErrUnknown: the object may exist; no reference to it was returned. Any
// other error: not done.
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

// allocAs is Alloc in a slab of a class; grow bounds how many regions it asks for.
func (a *Allocator) allocAs(class proto.Class, grow int, payload []byte, w *Want) (proto.Ref, error) {
	k := magKey{w.Home(), w.Kind, class}
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

// unreachable reports that a call has changed nothing because a region cannot be used:
// the caller may try another region.
func unreachable(err error) bool {
	return errors.Is(err, slab.ErrUnavailable) && !errors.Is(err, slab.ErrUnknown)
}

// dropEpoch forgets what belongs to an ended epoch of a region, or to an earlier one:
// Reconcile has released the claims. Claims of a later epoch are still held.
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

// Free ends an object. If the lane's magazine has room, it keeps the slab as a claim, so
// that neither R nor the map bit has to be cleared. Otherwise the bit is cleared later,
// together with others. last is the payload that was freed, in the lane's scratch memory.
func (a *Allocator) Free(ref proto.Ref) (last []byte, info slab.Info, err error) {
	return a.free(ref, a.lane.Free)
}

// FreeVersion is Free of an object that is still at a version; slab.ErrConflict otherwise.
func (a *Allocator) FreeVersion(ref proto.Ref, version uint64) (last []byte, info slab.Info, err error) {
	return a.free(ref, func(ref proto.Ref, keep bool) (slab.Claim, []byte, slab.Info, error) {
		return a.lane.FreeVersion(ref, version, keep)
	})
}

func (a *Allocator) free(ref proto.Ref, free func(ref proto.Ref, keep bool) (slab.Claim, []byte, slab.Info, error)) (last []byte, info slab.Info, err error) {
	keep, home := false, Home{}
	if reg, err := a.lane.Port().Region(ref.Addr.Region()); err == nil {
		home = Home{reg.Replicas(), reg.Durable}
		if b, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off())); ok {
			if h := reg.Headers.Load(b); h != 0 && h.State() == proto.BlockActive {
				m := a.magazine(magKey{home, h.Kind(), h.Class()})
				keep = len(m.claims) < a.room(h.Class()) && a.held+h.Class().Bytes() <= MaxHeldBytes
			}
		}
	}
	c, last, info, err := free(ref, keep)
	if err != nil {
		return nil, info, err
	}
	if c.Held {
		a.put(a.magazine(magKey{home, c.Slab.Kind, c.Slab.Class}), c)
		return last, info, nil
	}
	a.cleared = append(a.cleared, clearing{c.Reg, c.Slab, c.Generation})
	return last, info, nil
}

// Tidy clears the map bits of freed slabs once there are many. Call it between operations.
// The slabs are free already; searches skip them until their bits are cleared.
func (a *Allocator) Tidy() error {
	if len(a.cleared) < claimSlabs {
		return nil
	}
	return a.flushCleared()
}

// Forget drops the claims and pending bits of regions for which over reports that the
// epoch has ended: Reconcile has released them.
func (a *Allocator) Forget(over func(*slab.Region) bool) {
	a.cleared = slices.DeleteFunc(a.cleared, func(c clearing) bool { return over(c.reg) })
	for _, k := range a.keys() {
		m := a.mags[k]
		m.claims = slices.DeleteFunc(m.claims, func(c slab.Claim) bool { return over(c.Reg) })
	}
	a.recount()
}

// Idle reports that there is nothing to give back.
func (a *Allocator) Idle() bool { return len(a.cleared) == 0 && a.Held() == 0 }

// Trim gives every claim back but those in regions that cannot be used now: they stay
// in the magazines, and pending bits of such regions stay pending.
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

// Close gives every claim back. Claims that cannot be given back are left to the scrub,
// and the session ends. Pending bits of regions that cannot be used now stay pending: see
// Idle. The allocator may be used again.
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
