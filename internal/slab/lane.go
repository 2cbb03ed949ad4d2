package slab

import (
	"errors"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Lane runs programs, one at a time. It owns the scratch memory they need.
type Lane struct {
	port  Port
	round rdma.Round
	tally rdma.Tally
	op    op
	// freeing: the operation in hand is a Free, which write-once slabs allow.
	freeing bool
	batch   batch
	halves  halves
	info    Info // lent to the callback of Update
	// Of a copier: what it gathers, of pieces of so many bytes.
	gathered  *copies
	copyBytes int

	word  []byte              // 16 bytes: headers, R and V of the primary
	words [MaxReplicas][]byte // 8 bytes each: V of each replica
	slab  []byte              // a whole slab as READ
	image []byte              // an image to WRITE
}

// NewLane makes a lane on a port.
func NewLane(p Port) (*Lane, error) {
	small, err := p.Buffer(16 + 8*MaxReplicas)
	if err != nil {
		return nil, err
	}
	l := &Lane{port: p, copyBytes: copyBytes, word: small[:16]}
	for i := range l.words {
		l.words[i] = small[16+8*i : 24+8*i]
	}
	return l, nil
}

// Tally is what the lane has sent over the fabric so far.
func (l *Lane) Tally() *rdma.Tally { return &l.tally }

// Info describes an image.
type Info struct {
	Version uint64
	Born    uint64
	Tag     uint32
	Writer  proto.R
}

func infoOf(h proto.ImageHeader) Info {
	return Info{Version: h.Version, Born: h.Born, Tag: h.Tag, Writer: h.Writer}
}

// errAgain: the operation starts again under the present table. Never leaves the package.
var errAgain = errors.New("start again")

func (l *Lane) do() {
	l.port.Do(&l.round)
	l.tally.Count(&l.round)
}

// settle gives up what failed in the last round; see Port.Settle.
func (l *Lane) settle(reg *Region) error { return l.port.Settle(reg, &l.round) }

// answer guards an answer drawn from a READ: without a lease somebody else may
// have been given the right to change what was read.
func (l *Lane) answer(err error) error {
	if bug(BugLeaseUnchecked) || l.port.LeaseValid() {
		return err
	}
	return ErrLease
}

// buffer grows one of the lane's scratch buffers to n bytes. Sizes are powers of
// two, so a lane wastes at most as much as it uses.
func (l *Lane) buffer(b *[]byte, n int) ([]byte, error) {
	if len(*b) < n {
		size := 4096
		for size < n {
			size *= 2
		}
		nb, err := l.port.Buffer(size)
		if err != nil {
			return nil, err
		}
		*b = nb
	}
	return (*b)[:n], nil
}

// op is the state of the operation in hand.
type op struct {
	ref  proto.Ref
	reg  *Region
	slab proto.Slab
	seed uint64
	r    proto.R // reservation held, or being taken
	v    proto.V // V of the primary under the reservation
}

// begin finds region and slab of a ref.
func (l *Lane) begin(ref proto.Ref) error {
	o := &l.op
	reg, err := l.port.Region(ref.Addr.Region())
	if err != nil {
		return err
	}
	s, err := l.locate(reg, ref)
	if err != nil {
		return err
	}
	o.ref, o.reg, o.slab = ref, reg, s
	o.seed = proto.Seed(reg.Seed, s.Off, ref.Life.Generation())
	return nil
}

// view is what a READ of a slab shows to somebody who holds a ref.
type view uint8

const (
	viewLive    view = iota // the active image is whole and the ref's
	viewFreed               // FREE, or another object's
	viewTorn                // seal or version do not fit: concurrent change, or damage
	viewDamaged             // V says BAD, or is no V at all
	viewOther               // the active image is not in the part that was READ
)

// look judges a whole slab that has been READ into buf.
func (l *Lane) look(o *op, buf []byte) (vw view, v proto.V, h proto.ImageHeader, payload []byte) {
	return l.lookIn(o, o.slab.Off, buf)
}

// lookIn judges a part of a slab that has been READ at off; see proto.Slab.ImageIn.
func (l *Lane) lookIn(o *op, off uint64, buf []byte) (vw view, v proto.V, h proto.ImageHeader, payload []byte) {
	_, v = o.slab.WordsIn(off, buf)
	switch {
	case !v.Valid() || v.State() == proto.StateBad:
		return viewDamaged, v, h, nil
	case v.State() == proto.StateFree:
		return viewFreed, v, h, nil
	}
	img := o.slab.ImageIn(off, buf, v.Version())
	l.halves.learn(o, v)
	if img == nil {
		return viewOther, v, h, nil
	}
	h, payload, ok := proto.OpenImage(img, o.seed)
	if bug(BugNoSealCheck) {
		ok, payload = true, img[proto.ImageHeaderBytes:]
		payload = payload[:min(h.Length, len(payload))]
	}
	if !ok || h.Version != v.Version() && !bug(BugVersionUncompared) {
		return viewTorn, v, h, nil
	}
	if h.Born != o.ref.Life.Born() && !bug(BugBornUnchecked) {
		return viewFreed, v, h, nil
	}
	return viewLive, v, h, payload
}

// For the allocator, whose programs run on the same lane:

// Port is the lane's port.
func (l *Lane) Port() Port { return l.port }

// Round is the lane's round, to be filled and sent with Do.
func (l *Lane) Round() *rdma.Round { return &l.round }

// Do sends the lane's round and counts it.
func (l *Lane) Do() { l.do() }

// Settle gives up what failed in the lane's last round; see Port.Settle.
func (l *Lane) Settle(reg *Region) error { return l.settle(reg) }
