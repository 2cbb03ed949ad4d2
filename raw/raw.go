package raw

import (
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

const (
	// MaxBatch is how many bytes one Read or Write moves at most, so that they fit a chain and the lane's memory.
	MaxBatch = rdma.MaxVerbBytes
	// MaxPieces is how many pieces one Read or Write has at most.
	MaxPieces = 1024
)

// Piece is a range of a raw region's data.
type Piece struct {
	Region uint32 // number in the table
	Off    uint64 // from the region's start, at least proto.RawDataOff
	Buf    []byte
}

// ErrUnaligned: the address of a word is not a multiple of 8.
var ErrUnaligned = errors.New("not a multiple of 8")

// ErrOutside: a range that is not within the data of a raw region.
var ErrOutside = errors.New("outside of the region's data")

// ErrNotRaw: the region holds slabs.
var ErrNotRaw = errors.New("not a raw region")

// ErrLimit: more than MaxBatch bytes or MaxPieces pieces in one call.
var ErrLimit = errors.New("too much for one call")

// Lane runs programs over raw regions on a lane of package slab. One goroutine at a time uses the two of them.
type Lane struct {
	lane  *slab.Lane
	port  slab.Port
	words []byte // 8 bytes for each replica, and 8 for what is written
	stage []byte // MaxBatch bytes to WRITE; nil before the first
	bufs  [slab.MaxListed][]byte
	// Storage that is used again. Empty between calls.
	regs   []*slab.Region // the views of a call's pieces
	pieces []Piece        // see Pieces
}

// New makes a lane.
func New(l *slab.Lane) (*Lane, error) {
	words, err := l.Port().Buffer(8 * (slab.MaxListed + 1))
	if err != nil {
		return nil, err
	}
	return &Lane{lane: l, port: l.Port(), words: words}, nil
}

// region is the present view of a raw region, in which [off, off+n) is data.
func (l *Lane) region(id uint32, off, n uint64) (*slab.Region, error) {
	reg, err := l.port.Region(id)
	switch {
	case err != nil:
		return nil, err
	case !reg.Raw:
		return nil, fmt.Errorf("region %d: %w", id, ErrNotRaw)
	}
	// Memory behind MaxRawData is there where pages are of 1 GiB. It is no data: its words have no number in a reservation.
	end := min(reg.Geometry.RegionBytes, proto.RawDataOff+proto.MaxRawData)
	if off < proto.RawDataOff || off > end || n > end-off {
		return nil, fmt.Errorf("region %d: %d bytes at %#x of its data: %w", id, n, off-proto.RawDataOff, ErrOutside)
	}
	return reg, nil
}

// Pieces returns n pieces for the caller to fill and to pass to Read or Write, which empty them.
func (l *Lane) Pieces(n int) []Piece {
	l.pieces = slices.Grow(l.pieces[:0], n)[:n]
	return l.pieces
}

// views looks the regions of pieces up. A lookup may wait. If the table changes meanwhile, nodes refuse the round, and the call tries
// again.
func (l *Lane) views(pieces []Piece) ([]*slab.Region, error) {
	if len(pieces) > MaxPieces {
		return nil, fmt.Errorf("%w: %d pieces, at most %d", ErrLimit, len(pieces), MaxPieces)
	}
	l.regs = l.regs[:0]
	sum := 0
	for i := range pieces {
		p := &pieces[i]
		reg, err := l.region(p.Region, p.Off, uint64(len(p.Buf)))
		if err != nil {
			return nil, err
		}
		l.regs = append(l.regs, reg)
		sum += len(p.Buf)
	}
	if sum > MaxBatch {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrLimit, sum, MaxBatch)
	}
	return l.regs, nil
}

// forget lets go of what a call's storage refers to.
func (l *Lane) forget() {
	clear(l.pieces)
	clear(l.regs)
}

// chain is the round's chain to a target, with room for two more verbs.
func chain(r *rdma.Round, to *rdma.Target) *rdma.Chain {
	for i := range r.Len() {
		if c := r.At(i); c.To == to && len(c.Verbs)+2 <= rdma.MaxChainVerbs {
			return c
		}
	}
	return r.Chain(to)
}

// Read READs pieces, at most MaxBatch bytes, in one round. After an error the buffers hold undefined bytes.
func (l *Lane) Read(pieces []Piece) error {
	defer l.forget()
	return l.read(pieces, nil)
}

// read is Read. more appends to the round.
func (l *Lane) read(pieces []Piece, more func(r *rdma.Round, reg *slab.Region)) error {
	for attempt := 1; ; attempt++ {
		regs, err := l.views(pieces)
		if err != nil {
			return err
		}
		r := l.lane.Round()
		r.Reset()
		for i, reg := range regs {
			if len(pieces[i].Buf) > 0 {
				chain(r, reg.P()).Read(pieces[i].Off, pieces[i].Buf)
			}
		}
		if r.Len() == 0 {
			return nil
		}
		if more != nil {
			more(r, regs[0])
		}
		l.lane.Do()
		if r.Err() == nil {
			return l.answer()
		}
		if err := l.lane.Settle(regs[0]); err != nil {
			return err
		}
		if err := l.port.Pause(attempt); err != nil {
			return err
		}
	}
}

// answer returns slab.ErrLease if the lease has run out: a failover may have replaced the primary that was READ.
func (l *Lane) answer() error {
	if l.port.LeaseValid() {
		return nil
	}
	return slab.ErrLease
}

// Write WRITEs pieces, at most MaxBatch bytes, to all replicas. nil: each of them has every byte, on stable storage where the region
// is durable. slab.ErrUnknown: any of the bytes may have been written. Other errors: none has.
func (l *Lane) Write(pieces []Piece) error {
	defer l.forget()
	if l.stage == nil {
		var err error
		if l.stage, err = l.port.Buffer(MaxBatch); err != nil {
			return err
		}
	}
	posted := false
	for attempt := 1; ; attempt++ {
		regs, err := l.views(pieces)
		if err == nil {
			err = writable(regs)
		}
		if err != nil {
			return outcome(posted, err)
		}
		failed, err := l.writeRound(regs, pieces, false, &posted)
		if err == nil && !failed {
			failed, err = l.writeRound(regs, pieces, true, &posted)
		}
		if err == nil && !failed {
			return nil
		}
		if err == nil {
			err = l.port.Pause(attempt)
		}
		if err != nil {
			return outcome(posted, err)
		}
	}
}

// outcome is the error of a change: unknown if some of it may have run.
func outcome(posted bool, err error) error {
	if !posted || errors.Is(err, slab.ErrUnknown) {
		return err
	}
	return fmt.Errorf("%w: %w", slab.ErrUnknown, err)
}

// writable refuses regions that the session may only read.
func writable(regs []*slab.Region) error {
	for _, reg := range regs {
		if reg.ReadOnly {
			return fmt.Errorf("region %d: %w", reg.ID, rdma.ErrReadOnly)
		}
	}
	return nil
}

// writeRound WRITEs the pieces to the replicas in sync, or to those that are being rebuilt. failed: some have not answered, and nothing
// posted can run any more. It sets posted unless no byte can have been written.
func (l *Lane) writeRound(regs []*slab.Region, pieces []Piece, rebuilding bool, posted *bool) (failed bool, _ error) {
	r := l.lane.Round()
	r.Reset()
	at := 0
	for i, reg := range regs {
		p := &pieces[i]
		if len(p.Buf) == 0 {
			continue
		}
		// A copy: a WRITE without an answer may run later, when the caller uses its memory for other things.
		b := l.stage[at : at+len(p.Buf)]
		copy(b, p.Buf)
		at += len(b)
		for k := range reg.N {
			if reg.Rebuilding[k] == rebuilding {
				c := chain(r, reg.To[k])
				c.Write(p.Off, b)
				flush(reg, c, p.Off, uint64(len(b)))
			}
		}
	}
	if r.Len() == 0 {
		return false, nil
	}
	l.lane.Do()
	ran := false
	for i := range r.Len() {
		ran = ran || !isRefused(r.At(i))
	}
	*posted = *posted || ran
	switch {
	case r.Err() == nil:
		return false, nil
	case !ran:
		return true, l.lane.Settle(regs[0])
	}
	return true, l.settleChange(regs[0])
}

// settleChange settles a round that changes memory. If that fails, the verbs may still run, so it ends the session.
func (l *Lane) settleChange(reg *slab.Region) error {
	err := l.lane.Settle(reg)
	if err != nil {
		l.lane.EndSession(fmt.Errorf("a write to region %d could not be settled: %w", reg.ID, err))
	}
	return err
}

// flush appends a FLUSH behind the WRITE or CAS before it, where the region is durable.
func flush(reg *slab.Region, c *rdma.Chain, off, n uint64) {
	if !reg.Durable {
		return
	}
	atomic := c.Verbs[len(c.Verbs)-1].Op != rdma.Write
	c.Flush(rdma.Persistent, off, n)
	if atomic {
		c.Fenced()
	}
}

// Flush returns when what was written to a range before is on stable storage at every replica. In a region that is not durable it does
// nothing.
func (l *Lane) Flush(region uint32, off, bytes uint64) error {
	for attempt := 1; ; attempt++ {
		reg, err := l.region(region, off, bytes)
		if err != nil || !reg.Durable || bytes == 0 {
			return err
		}
		r := l.lane.Round()
		r.Reset()
		for k := range reg.N {
			r.Chain(reg.To[k]).Flush(rdma.Persistent, off, bytes)
		}
		l.lane.Do()
		if r.Err() == nil {
			return nil
		}
		if err := l.lane.Settle(reg); err != nil {
			return err
		}
		if err := l.port.Pause(attempt); err != nil {
			return err
		}
	}
}
