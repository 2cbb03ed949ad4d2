package btree

import (
	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

// Lane is a Store on one lane of the slab protocol, for the simulator and for
// whoever runs programs without a client. Its values end at one slab.
type Lane struct {
	Slab     *slab.Lane
	Slabs    *alloc.Allocator
	Replicas int
}

// Read appends the payload to dst.
func (l *Lane) Read(ref Ref, dst []byte) ([]byte, error) {
	out, _, err := l.Slab.Read(ref, dst)
	return out, err
}

// View calls fn with the payload in the lane's memory.
func (l *Lane) View(ref Ref, fn func(payload []byte) error) error {
	b, _, err := l.Slab.View(ref)
	if err != nil {
		return err
	}
	return fn(b)
}

// ReadMany reads many objects in a round.
func (l *Lane) ReadMany(refs []Ref, fn func(i int, payload []byte, err error)) error {
	return l.Slab.ReadMany(refs, func(i int, b []byte, _ slab.Info, err error) { fn(i, b, err) })
}

// Update replaces a payload.
func (l *Lane) Update(ref Ref, f func(old []byte) ([]byte, error)) error {
	_, err := l.Slab.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return f(old) })
	return err
}

// Alloc makes an object of one slab.
func (l *Lane) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (Ref, error) {
	w := alloc.Want{Kind: proto.Pair, Capacity: capacity, Replicas: l.Replicas, Tag: tag}
	if writeOnce {
		w.Kind = proto.Single
	}
	return l.Slabs.Alloc(payload, w)
}

// Free ends an object.
func (l *Lane) Free(ref Ref) error {
	if _, _, err := l.Slabs.Free(ref); err != nil {
		return err
	}
	_ = l.Slabs.Tidy() // map bits only: the slab is free
	return nil
}
