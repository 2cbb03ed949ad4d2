package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// object is a slab under one view of its region, with the reference through which it is used.
// Everything that is done with the object belongs to the epoch of that view.
type object struct {
	ref  proto.Ref  // without an incarnation in scans; see anyObject
	reg  *Region    // the view
	slab proto.Slab // where it is, with class and kind as the block's header says
	seed uint64     // of the checksums of the slab's images
}

// resolve finds the region and the slab of a reference. It sends a round only if the block's
// header is not cached. errAgain: that round had no answer. Any other error is final: the
// reference names nothing that can be used.
func (l *Lane) resolve(o *object, ref proto.Ref) error {
	reg, err := l.port.Region(ref.Addr.Region())
	if err != nil {
		return err
	}
	if reg.Raw {
		return fmt.Errorf("%w: region %d holds plain bytes", ErrBadRef, reg.ID)
	}
	s, err := l.locate(reg, ref)
	if err != nil {
		return err
	}
	o.ref, o.reg, o.slab = ref, reg, s
	o.seed = proto.Seed(reg.Seed, s.Off, ref.Incarnation.Generation())
	return nil
}

// anyObject is a slab as scans use it. Its reference has the address and no incarnation: the scan
// works on whatever object is in the slab.
func anyObject(reg *Region, s proto.Slab, generation uint32) object {
	return object{ref: proto.Ref{Addr: proto.MakeAddr(reg.ID, uint32(s.Off))}, reg: reg, slab: s,
		seed: proto.Seed(reg.Seed, s.Off, generation)}
}

// imageState is what a READ of a slab shows to the holder of a reference.
type imageState uint8

const (
	imageLive      imageState = iota // the active image is whole, and of the reference's incarnation
	imageFreed                       // V is FREE, or the image is of another incarnation
	imageTorn                        // checksum or version do not match: a concurrent change, or damage
	imageDamaged                     // V is BAD, or not a valid V
	imageElsewhere                   // the active image is not in the part that was READ
	imageShadowed                    // home of a STAGED slab is not that of V yet, and L leads to a shadow
)

// sight is what a READ of a slab has shown.
type sight struct {
	state   imageState
	v       proto.V           // without the open bit
	header  proto.ImageHeader // of the active image, if it is live
	payload []byte            // of the active image, if it is live; in the buffer
	from    proto.Source      // of the active image of a STAGED slab
	open    bool              // V was found open: the rest is of its version, which may not be committed
}

// inspect judges a slab, or the part of it, that has been READ from offset off into buf, and sets
// s. The payload in s aliases buf.
func (l *Lane) inspect(o *object, off uint64, buf []byte, s *sight) {
	_, v := o.slab.WordsIn(off, buf)
	if s.open = v.IsOpen() && o.opens(); s.open {
		v = v.Settled()
	}
	s.v = v
	switch {
	case !v.Valid() || v.State() == proto.StateBad:
		s.state = imageDamaged
		return
	case v.State() == proto.StateFree:
		s.state = imageFreed
		return
	}
	if o.slab.Kind == proto.Staged {
		o.inspectStaged(buf, s)
		return
	}
	img := o.slab.ImageIn(off, buf, v.Version())
	l.halves.learn(o, v)
	if img == nil {
		s.state = imageElsewhere
		return
	}
	h, payload, ok := proto.DecodeImage(img, o.seed)
	switch {
	case !ok || h.Version != v.Version():
		s.state = imageTorn
	case h.Born != o.ref.Incarnation.Born():
		s.state = imageFreed
	default:
		s.state, s.header, s.payload = imageLive, h, payload
	}
}

// inspectStaged judges a STAGED slab whose V is LIVE, and that has been READ whole into buf. It
// may turn home in buf into the image that V names (proto.Slab.Compose).
func (o *object) inspectStaged(buf []byte, s *sight) {
	s.header, s.payload, s.from = o.slab.Compose(buf, s.v.Version(), o.seed)
	switch {
	case s.from == proto.FromShadow:
		s.state = imageShadowed
	case s.from == proto.FromNowhere:
		s.state = imageTorn
	case s.header.Born != o.ref.Incarnation.Born():
		s.state = imageFreed
	default:
		s.state = imageLive
	}
}

// whole returns the image of a version in img, cut to the bytes that have to be written; nil if
// img has another version or is damaged.
func (o *object) whole(img []byte, version uint64) []byte {
	h, _, ok := proto.DecodeImage(img, o.seed)
	if !ok || h.Version != version {
		return nil
	}
	return img[:proto.ImageLen(h.Length)]
}
