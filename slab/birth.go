package slab

import (
	"errors"

	"github.com/quarrystore/quarry/proto"
)

// Claim is a free slab that a session holds: its map bit is set and R names the session. It
// belongs to one epoch and is void when that epoch ends.
type Claim struct {
	Reg        *Region    // the view under which the slab was claimed
	Slab       proto.Slab // where it is
	Generation uint32     // of its block
	R          proto.R    // the value that R of the slab has
	V          proto.V    // FREE; the first image gets the next version
	Held       bool       // false: R has been cleared, only the map bit is still set
}

// Addr is where the claimed slab is.
func (c *Claim) Addr() proto.Addr { return proto.MakeAddr(c.Reg.ID, uint32(c.Slab.Off)) }

// ErrStaleClaim: the claim's epoch is over; nothing was done.
var ErrStaleClaim = errors.New("claim of an earlier epoch")

// Birth writes an object's first image into a claimed slab: steps 2 and 3 of Update, under the
// reservation of the claim. One round with one replica, two with more.
//
// Linearizes at: the CAS of V at the primary; see commit for a change of epoch.
//
// nil: done. ErrStaleClaim: not done, and the claim is void; another one may be tried.
// ErrUnknown: the object may exist, but no reference to it was returned. ErrNoRegion: nothing was
// posted, and the claim is void. Any other error: nothing was posted, and the caller still has
// the claim.
func (l *Lane) Birth(c Claim, payload []byte, tag uint32) (proto.Ref, error) {
	reg, err := l.port.Region(c.Reg.ID)
	if err != nil {
		return proto.Ref{}, err
	}
	if reg.Epoch != c.Reg.Epoch {
		return proto.Ref{}, ErrStaleClaim
	}
	n := c.V.Version() + 1
	if err := l.fits(len(payload), c.Slab); err != nil {
		return proto.Ref{}, err
	}
	img, err := l.buffer(&l.image, proto.ImageLen(len(payload)+l.Overhead()))
	if err != nil {
		return proto.Ref{}, err
	}
	a := attempt{object: anyObject(reg, c.Slab, c.Generation), r: c.R, sight: sight{v: c.V}}
	a.encryption = l.encryption
	a.ref.Incarnation = proto.MakeIncarnation(c.Generation, n)
	a.put(img, proto.ImageHeader{Length: len(payload), Version: n, Tag: tag, Born: n, Writer: c.R}, payload)
	switch l.commit(&a); a.result {
	case done:
		return a.ref, nil
	case notDone:
		return proto.Ref{}, ErrStaleClaim
	}
	return proto.Ref{}, a.err
}
