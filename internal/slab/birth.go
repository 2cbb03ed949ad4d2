package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Claim is a free slab that a session holds: its map bit is taken and R names the
// session. It belongs to one epoch and dies with it.
type Claim struct {
	Reg        *Region
	Slab       proto.Slab
	Generation uint32
	R          proto.R
	V          proto.V // {FREE, version}
	Held       bool    // false: R has been cleared, only the map bit is still set
}

// Addr is where the claimed slab is.
func (c *Claim) Addr() proto.Addr { return proto.MakeAddr(c.Reg.ID, uint32(c.Slab.Off)) }

// ErrStaleClaim: the claim's epoch is over; nothing was done.
var ErrStaleClaim = errors.New("claim of an earlier epoch")

// Birth writes an object's first image into a claimed slab. One round with one
// replica, two with more. A Birth that does not return nil has no Ref; after
// ErrStaleClaim another claim may be tried. After any other error but ErrUnknown
// nothing was posted, and the claim is still the caller's.
//
// Linearizes at: the CAS of V at the primary.
func (l *Lane) Birth(c Claim, payload []byte, tag uint32) (proto.Ref, error) {
	reg, err := l.port.Region(c.Reg.ID)
	if err != nil {
		return proto.Ref{}, err
	}
	if reg.Epoch != c.Reg.Epoch && !bug(BugStaleMagazine) {
		return proto.Ref{}, ErrStaleClaim
	}
	n := c.V.Version() + 1
	if room := c.Slab.Class.PayloadBytes(c.Slab.Kind); len(payload) > room {
		return proto.Ref{}, fmt.Errorf("%w: %d bytes, the slab has room for %d", ErrTooLarge, len(payload), room)
	}
	ref := proto.Ref{Addr: c.Addr(), Life: proto.MakeLife(c.Generation, n)}
	l.op = op{ref: ref, reg: reg, slab: c.Slab, seed: proto.Seed(reg.Seed, c.Slab.Off, c.Generation), r: c.R, v: c.V}
	o := &l.op
	img, err := l.seal(o, proto.ImageHeader{Length: len(payload), Version: n, Tag: tag, Born: n, Writer: c.R}, payload)
	if err != nil {
		return proto.Ref{}, err
	}
	err = l.commit(o, change{v: proto.MakeV(proto.StateLive, n), at: c.Slab.ImageOff(n), img: img})
	switch {
	case err == nil || errors.Is(err, errDone):
		return ref, nil
	case errors.Is(err, errNotDone):
		return proto.Ref{}, ErrStaleClaim
	}
	return proto.Ref{}, err
}
