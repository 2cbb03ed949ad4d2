package client

import (
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
)

// SlabKind says how an object lies in memory.
type SlabKind uint8

const (
	// PairSlab: a mutable object with room for two images. An update writes the other one.
	PairSlab SlabKind = iota + 1
	// StagedSlab: a mutable object with one image, in regions with one replica: about half the memory
	// of a PairSlab. An update writes what changes twice, and takes 1.3 to 2.5 times as long. Objects with
	// room for more than 64 KiB have PairSlabs nevertheless.
	StagedSlab
	// SingleSlab: a write-once object. See AllocOptions.WriteOnce.
	SingleSlab
)

var slabKinds = map[SlabKind]proto.Kind{PairSlab: proto.Pair, StagedSlab: proto.Staged, SingleSlab: proto.Single}

func (k SlabKind) String() string {
	if p, ok := slabKinds[k]; ok {
		return p.String()
	}
	return fmt.Sprintf("slab kind %d", uint8(k))
}

// MarshalText writes PAIR, STAGED or SINGLE; nothing where the kind is not known.
func (k SlabKind) MarshalText() ([]byte, error) {
	if k == 0 {
		return nil, nil
	}
	return []byte(k.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (k *SlabKind) UnmarshalText(b []byte) error {
	if *k = 0; len(b) == 0 {
		return nil
	}
	for s, p := range slabKinds {
		if p.String() == string(b) {
			*k = s
			return nil
		}
	}
	return fmt.Errorf("slab kind %q: want PAIR, STAGED or SINGLE", b)
}

// slabKindOf is the kind of a header.
func slabKindOf(p proto.Kind) SlabKind {
	for k := range slabKinds {
		if slabKinds[k] == p {
			return k
		}
	}
	return 0
}

// checkSlab checks the kind of slab that options ask for. standard is that of the Config.
func checkSlab(o *AllocOptions, standard SlabKind) error {
	if o.Slab == 0 && !o.WriteOnce {
		o.Slab = standard
	}
	switch {
	case o.Slab > StagedSlab:
		return fmt.Errorf("%w: %v: want PairSlab or StagedSlab, or WriteOnce", ErrArgument, o.Slab)
	case o.Slab != 0 && o.WriteOnce:
		return fmt.Errorf("%w: a write-once object has a slab of the kind %v, not %v", ErrArgument, SingleSlab, o.Slab)
	case o.Slab == StagedSlab && o.Replicas != 1:
		return fmt.Errorf("%w: %w, not %d: ask for 1 replica, or for PAIR slabs", ErrArgument, alloc.ErrStagedReplicas, o.Replicas)
	}
	return nil
}

// want translates options that checkAlloc has completed, for an object with this capacity in
// bytes.
func (l *lane) want(room int, o *AllocOptions) alloc.Want {
	w := alloc.Want{Kind: proto.Pair, Capacity: o.Capacity, Replicas: o.Replicas, Durable: o.Durability == Durable, Tag: o.Tag}
	switch {
	case o.WriteOnce:
		w.Kind = proto.Single
	case o.Slab == StagedSlab && room <= l.slab.MaxPayloadBytes(proto.Staged):
		w.Kind = proto.Staged
	}
	return w
}
