package btree

import (
	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// Lane is a Store on one lane of the slab protocol, for the simulator and for tests without
// a client. A value has to fit one slab.
type Lane struct {
	Slab     *slab.Lane
	Slabs    *alloc.Allocator
	Replicas int
	Durable  bool
	Staged   bool // nodes lie in STAGED slabs: for trees with Config.Staged
}

// Begin does nothing: a lane has one session.
func (l *Lane) Begin() {}

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
	w := alloc.Want{Kind: proto.Pair, Capacity: capacity, Replicas: l.Replicas, Durable: l.Durable, Tag: tag}
	switch {
	case writeOnce:
		w.Kind = proto.Single
	case l.Staged:
		w.Kind = proto.Staged
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
