package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Update replaces the payload by what f makes of the present one. f may be called
// more than once; an error from it leaves the object as it was. Two rounds with
// one replica, three with more.
//
// Linearizes at: the CAS of V at the primary, in commitPrimary.
//
// f may change info.Tag; it must not keep old.
func (l *Lane) Update(ref proto.Ref, f func(old []byte, info *Info) ([]byte, error)) (Info, error) {
	for tries := 1; ; tries++ {
		h, old, err := l.reserve(ref)
		if err != nil {
			return Info{}, err
		}
		o := &l.op
		l.info = infoOf(h)
		payload, err := f(old, &l.info)
		if room := o.slab.Class.PayloadBytes(proto.Pair); err == nil && len(payload) > room {
			err = fmt.Errorf("%w: %d bytes, this object has room for %d", ErrTooLarge, len(payload), room)
		}
		n := l.nextVersion(o)
		if err == nil && n > proto.MaxVersion {
			err = fmt.Errorf("%w: %v", ErrVersions, ref)
		}
		if err != nil {
			if rerr := l.release(o); rerr != nil {
				return Info{}, rerr
			}
			return Info{}, err
		}
		h.Version, h.Length, h.Writer, h.Tag = n, len(payload), o.r, l.info.Tag&proto.MaxTag
		img, err := l.seal(o, h, payload)
		if err != nil {
			return Info{}, errors.Join(err, l.release(o))
		}
		err = l.commit(o, change{v: proto.MakeV(proto.StateLive, n), at: o.slab.ImageOff(n), img: img})
		switch {
		case err == nil || errors.Is(err, errDone):
			return infoOf(h), nil
		case !errors.Is(err, errNotDone):
			return Info{}, err
		case tries > maxRestarts:
			return Info{}, fmt.Errorf("%w: %v: the table kept changing", ErrBusy, ref)
		}
		if err := l.port.Pause(tries); err != nil {
			return Info{}, err
		}
	}
}

// nextVersion is the smallest of the inactive image's parity above both V and the
// version in the inactive image's header: a dead writer's leftover image must
// never share its version with another, or a slow reader could put the two together.
//
// A version further ahead than maxSkip is damage, not a writer's: the slab would be
// out of versions by it.
func (l *Lane) nextVersion(o *op) uint64 {
	n := o.v.Version() + 1
	switch {
	case bug(BugInPlace):
		return n + 1
	case bug(BugShortVersion):
		return n & 15
	}
	left := proto.ParseImageHeader(o.slab.Image(l.slab, n)).Version
	if left >= n && left-n < maxSkip && !bug(BugNoVersionSkip) {
		n = left + 2 - (left^n)&1
	}
	return n
}

// maxSkip is more than the writers that can have died on a slab between two
// commits, and little of the 44 bits.
const maxSkip = 1 << 32

// seal copies the payload behind a header into the lane's image buffer.
func (l *Lane) seal(o *op, h proto.ImageHeader, payload []byte) ([]byte, error) {
	img, err := l.buffer(&l.image, proto.ImageLen(len(payload)))
	if err != nil {
		return nil, err
	}
	copy(img[proto.ImageHeaderBytes:], payload)
	return proto.SealImage(img, o.seed, h), nil
}

// Free ends the object: it commits a tombstone on the born version that the ref
// names, so a second Free fails. With keep the reservation stays with the lane
// and the slab is returned as a Claim; otherwise R is cleared and the claim only
// says which map bit may be cleared. last is the payload that was freed; it
// aliases the lane's scratch.
//
// Linearizes at: the CAS of V at the primary.
func (l *Lane) Free(ref proto.Ref, keep bool) (c Claim, last []byte, info Info, err error) {
	l.freeing = true
	defer func() { l.freeing = false }()
	for tries := 1; ; tries++ {
		h, last, err := l.reserve(ref)
		if err != nil {
			return Claim{}, nil, Info{}, err
		}
		o := &l.op
		n := o.v.Version() + 1
		if n > proto.MaxVersion {
			err := fmt.Errorf("%w: %v", ErrVersions, ref)
			return Claim{}, nil, Info{}, errors.Join(err, l.release(o))
		}
		if n > proto.MaxVersion-4 {
			// Nearly used up: never hand it out again.
			keep = false
		}
		v := proto.MakeV(proto.StateFree, n)
		err = l.commit(o, change{v: v, keep: keep})
		switch {
		case err == nil:
			c := Claim{Reg: o.reg, Slab: o.slab, Generation: ref.Life.Generation(), R: o.r, V: v, Held: keep}
			return c, last, infoOf(h), nil
		case !errors.Is(err, errNotDone):
			return Claim{}, nil, Info{}, err
		case tries > maxRestarts:
			return Claim{}, nil, Info{}, fmt.Errorf("%w: %v: the table kept changing", ErrBusy, ref)
		}
		if err := l.port.Pause(tries); err != nil {
			return Claim{}, nil, Info{}, err
		}
	}
}
