package slab

import (
	"errors"

	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Lane runs the operations of the slab protocol, one at a time, and owns the scratch memory that
// they need.
//
// One goroutine at a time uses a lane, and owns every field; there is no lock. What one operation
// knows is in its local variables (object, attempt, reading). The lane keeps what outlives an
// operation, and memory that is used again.
type Lane struct {
	// port is the lane's access to fabric, table, session and time. Never changes.
	port Port
	// round is the round that is being built, or that has been answered.
	// Invariant: a step reads all answers that it needs before the next step resets the round.
	round rdma.Round
	// tally counts what the lane has sent. It only grows.
	tally rdma.Tally
	// halves guesses which half of a slab holds the active image. A wrong guess costs one more
	// round and nothing else.
	halves halves
	// late is what was posted behind the last commit and is not waited for. helped is the V that a READ found open last.
	late   late
	helped seenOpen
	// batch is the storage of ReadMany, WriteMany, UpdateMany and ReadChunks. Empty between calls.
	batch batch
	// set is what the lane holds between Hold and Drop; nil before the first.
	set *set
	// unlike says of each replica which pieces it is not asked to compare.
	unlike [MaxListed]unlike
	// gathered is the storage of a copier, nil until the lane copies.
	gathered *copies
	// copyBytes is how many bytes of a block a copier READs at once; one slab at least.
	copyBytes int
	// keys are those of Encrypt; encryption is what the lane encrypts with. Both are nil without
	// keys. Set before the first operation, and never changed.
	keys       *payloadkey.Ring
	encryption *encryption
	// ended is why the lane has ended its session; nil: it has not. It posts nothing more then: a shadow, or another
	// claim, may be the only whole copy of what a takeover has to find.
	ended error
	// shadows lends slabs for updates of STAGED slabs that no record has room for; nil: none. Set
	// once.
	shadows Shadows
	// fenced belongs to the chains of a commit's round: for each chain a bit for each kind of
	// verbs that has its fence already. See fenceOnce.
	fenced [maxWrites * MaxListed]uint8
	// unclear is the least tag of an image whose payload needs a look before it is used. Without
	// keys that is the lowest tag of encrypted payloads. With keys it is 0, because then a
	// payload that is not encrypted needs a look too.
	unclear uint32
	// info is lent to the callback of Update for the time of the call: a local variable would
	// escape to the heap.
	info Info

	// Memory that verbs can use. The contents belong to the step that has READ them or is
	// about to WRITE them, and die with the next step that uses the same buffer.
	word  []byte            // 16 bytes: a header, or R and V of the primary
	words [MaxListed][]byte // 8 bytes each: a word of each replica
	marks [MaxListed][]byte // replicaMarks each
	slab  []byte            // a whole slab as READ; grows
	image []byte            // an image to WRITE, or as READ from a backup; grows
	taken []byte            // R and V of the slabs of a staging block
}

// NewLane makes a lane on a port.
func NewLane(p Port) (*Lane, error) {
	small, err := p.Buffer(16 + (8+replicaMarks)*MaxListed)
	if err != nil {
		return nil, err
	}
	l := &Lane{port: p, halves: halves{from: halfBytes}, copyBytes: copyBytes, unclear: proto.TagEncrypted, word: small[:16]}
	for i := range l.words {
		l.words[i] = small[16+8*i : 24+8*i]
		l.marks[i] = small[16+8*MaxListed+replicaMarks*i:][:replicaMarks]
	}
	return l, nil
}

// Tally counts what the lane has sent over the fabric.
func (l *Lane) Tally() *rdma.Tally { return &l.tally }

// Info describes an image.
type Info struct {
	Version uint64
	Born    uint64
	Tag     uint32
	Writer  proto.R
	Kind    proto.Kind  // of the object's slab
	Class   proto.Class // of the object's slab
}

// infoOf describes an image with header h in slab s.
func infoOf(h proto.ImageHeader, s proto.Slab) Info {
	return Info{Version: h.Version, Born: h.Born, Tag: h.Tag, Writer: h.Writer, Kind: s.Kind, Class: s.Class}
}

// errAgain: the step has changed nothing that others see, and the attempt holds nothing. The
// operation starts again under the present table. It never leaves the package.
var errAgain = errors.New("start again")

// do sends the lane's round, waits for all its answers and counts it. Once the lane has ended its session
// nothing is posted: every chain fails.
func (l *Lane) do() {
	if l.ended != nil {
		l.failRound()
		return
	}
	l.port.Do(&l.round)
	l.tally.Count(&l.round)
	l.awaited()
}

func (l *Lane) failRound() {
	for i := range l.round.Len() {
		l.round.At(i).Err = l.ended
	}
}

// settle waits until nothing that failed in the last round can run any more; see
// Port.Settle. An error once the lane has ended its session.
func (l *Lane) settle(reg *Region) error {
	if l.ended != nil {
		return l.ended
	}
	if err := l.port.Settle(reg, &l.round); err != nil {
		return err
	}
	if len(l.late.owed) > 0 && !l.late.posted {
		l.redeem()
	}
	return l.ended
}

// EndSession ends the session: the lane has posted what it cannot settle, and posts nothing more.
func (l *Lane) EndSession(reason error) {
	if l.ended == nil {
		l.ended = reason
	}
	l.port.EndSession(reason)
}

// NewSession says that the lane's port works under another session from now on.
func (l *Lane) NewSession() {
	l.ended = nil
	l.late.owed, l.late.posted = l.late.owed[:0], false
	if l.set != nil {
		l.set.members = l.set.members[:0]
	}
}

// answer checks the lease before an answer drawn from a READ is given: a failover does not
// wait for a session without a lease, so the primary that answered may have been replaced.
// It returns err, or ErrLease.
func (l *Lane) answer(err error) error {
	if l.port.LeaseValid() {
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

// For the allocator, which runs on the same lane:

// Port is the lane's port.
func (l *Lane) Port() Port { return l.port }

// Round is the lane's round, to be filled and sent with Do.
func (l *Lane) Round() *rdma.Round { return &l.round }

// Do sends the lane's round and counts it.
func (l *Lane) Do() { l.do() }

// Settle gives up what failed in the lane's last round; see Port.Settle.
func (l *Lane) Settle(reg *Region) error { return l.settle(reg) }
