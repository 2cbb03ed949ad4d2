package alloc

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

var (
	// ErrNoSpace: no region has room for a slab of the class, and none can be made.
	ErrNoSpace = errors.New("no space")
	// ErrTooLarge: no slab is large enough.
	ErrTooLarge = slab.ErrTooLarge
)

// Source is what the allocator sees of the cluster.
type Source interface {
	// Regions lists the open regions with so many replicas, in ascending order.
	// The slice is not changed by either side.
	Regions(replicas int) []uint32
	// Grow asks for another region with so many replicas, unless one with a higher
	// number than newest exists by now. nil: look again.
	Grow(replicas int, newest uint32) error
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
	// maxStale bounds the claims of earlier epochs that one Alloc drops.
	maxStale = 16
)

// Want is what an object needs.
type Want struct {
	Kind     proto.Kind
	Capacity int // largest payload it will ever hold; the payload's length if smaller
	Replicas int
	Tag      uint32
}

// Allocator hands out slabs on one lane.
type Allocator struct {
	lane *slab.Lane
	src  Source

	mags     map[magKey]*magazine
	order    []magKey // of mags: maps have none
	surveys  map[uint32]*survey
	cleared  []clearing
	headers  []byte // a region's block headers as READ
	maps     []byte // a block's map as READ
	pairs    []byte // R and V of each slab of a refill
	wordRead []byte
	block    []byte // scratch of reclaim
}

type magKey struct {
	replicas int
	kind     proto.Kind
	class    proto.Class
}

type magazine struct {
	claims []slab.Claim
	at     cursor // block in use
}

// New makes an allocator on a lane.
func New(l *slab.Lane, src Source) (*Allocator, error) {
	p := l.Port()
	a := &Allocator{lane: l, src: src, mags: map[magKey]*magazine{}, surveys: map[uint32]*survey{}}
	var err1, err2, err3 error
	a.maps, err1 = p.Buffer(proto.MapBytes)
	a.pairs, err2 = p.Buffer(16 * claimSlabs)
	a.wordRead, err3 = p.Buffer(8 * slab.MaxReplicas)
	return a, errors.Join(err1, err2, err3)
}

// ClassFor is the size class of an object, best fit.
func ClassFor(payloadBytes int, k proto.Kind) (proto.Class, error) {
	c, ok := proto.ClassFor(payloadBytes, k)
	if !ok {
		return 0, fmt.Errorf("%w: %d bytes, the largest %v slab holds %d", ErrTooLarge, payloadBytes, k, proto.MaxPayloadBytes(k))
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

// Alloc claims a slab and gives it its first payload. No round for the claim when
// the magazine has one; Birth's rounds.
func (a *Allocator) Alloc(payload []byte, w Want) (proto.Ref, error) {
	class, err := ClassFor(max(len(payload), w.Capacity), w.Kind)
	if err != nil {
		return proto.Ref{}, err
	}
	k := magKey{w.Replicas, w.Kind, class}
	m := a.magazine(k)
	for stale := 0; ; {
		if len(m.claims) == 0 {
			if err := a.refill(k, m); err != nil {
				return proto.Ref{}, err
			}
		}
		c := m.claims[len(m.claims)-1]
		m.claims = m.claims[:len(m.claims)-1]
		ref, err := a.lane.Birth(c, payload, w.Tag)
		if errors.Is(err, slab.ErrStaleClaim) {
			a.dropEpoch(c.Reg)
			if stale++; stale < maxStale {
				continue
			}
		} else if err != nil && !errors.Is(err, slab.ErrUnknown) && !slab.Broken(slab.BugClaimLost) {
			m.claims = append(m.claims, c) // nothing was posted: it is still this lane's
		}
		return ref, err
	}
}

// dropEpoch forgets what belongs to an epoch of a region that is over, or to one
// before it: reconcile has freed the claims. Those of a later epoch are held still.
func (a *Allocator) dropEpoch(over *slab.Region) {
	if s := a.surveys[over.ID]; s != nil && s.epoch <= over.Epoch {
		delete(a.surveys, over.ID)
	}
	gone := func(r *slab.Region) bool {
		return r.ID == over.ID && (r.Epoch <= over.Epoch || slab.Broken(slab.BugClaimsDropped))
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
}

// Free ends an object. Its slab stays in the lane's magazine if there is room,
// which saves the release and the map bit; otherwise the bit is cleared later,
// many at a time. last is the payload that was freed, in the lane's scratch.
func (a *Allocator) Free(ref proto.Ref) (last []byte, info slab.Info, err error) {
	keep, replicas := false, 0
	if reg, err := a.lane.Port().Region(ref.Addr.Region()); err == nil {
		replicas = reg.Replicas()
		if b, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off())); ok {
			if h := reg.Headers.Load(b); h != 0 && h.State() == proto.BlockActive {
				m := a.magazine(magKey{replicas, h.Kind(), h.Class()})
				keep = len(m.claims) < magazineRoom(h.Class())
			}
		}
	}
	c, last, info, err := a.lane.Free(ref, keep)
	if err != nil {
		return nil, info, err
	}
	if c.Held {
		m := a.magazine(magKey{replicas, c.Slab.Kind, c.Slab.Class})
		m.claims = append(m.claims, c)
		return last, info, nil
	}
	a.cleared = append(a.cleared, clearing{c.Reg, c.Slab, c.Generation})
	return last, info, nil
}

// Tidy clears the map bits of freed slabs once there are many: call it between
// operations. The slabs are free already; until then nobody looks at them.
func (a *Allocator) Tidy() error {
	if len(a.cleared) < claimSlabs {
		return nil
	}
	return a.flushCleared()
}

// magazineRoom is how many claims of a class a lane keeps: at most claimBytes of them.
func magazineRoom(c proto.Class) int { return max(1, min(magazineSlabs, claimBytes/c.Bytes())) }

// Forget drops the claims and pending bits of regions of which over says that the
// epoch has ended: reconcile has freed them.
func (a *Allocator) Forget(over func(*slab.Region) bool) {
	a.cleared = slices.DeleteFunc(a.cleared, func(c clearing) bool { return over(c.reg) })
	for _, k := range a.keys() {
		m := a.mags[k]
		m.claims = slices.DeleteFunc(m.claims, func(c slab.Claim) bool { return over(c.Reg) })
	}
}

// Idle says whether there is nothing to give back.
func (a *Allocator) Idle() bool { return len(a.cleared) == 0 && a.Held() == 0 }

// Close gives every claim back. What cannot be given back is the scrub's. The
// allocator may be used again.
func (a *Allocator) Close() error {
	var errs []error
	for _, k := range a.keys() {
		m := a.mags[k]
		if err := a.giveBack(m.claims); err != nil {
			errs = append(errs, err)
		}
		m.claims = nil
	}
	errs = append(errs, a.flushCleared())
	return errors.Join(errs...)
}

// keys lists the magazines in the order in which they were made.
func (a *Allocator) keys() []magKey { return a.order }

// Held is the number of claims in magazines.
func (a *Allocator) Held() int {
	n := 0
	for _, k := range a.keys() {
		n += len(a.mags[k].claims)
	}
	return n
}
