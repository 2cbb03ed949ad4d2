package fsck

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// Region is one region to check. Its connections are the check's alone meanwhile.
type Region struct {
	ID    uint32   // number in the table
	UUID  [16]byte // seeds the checksums
	Epoch uint64   // in which it is open
	Bytes uint64   // its size
	// OpenWords: V of its PAIR and SINGLE slabs may be open.
	OpenWords bool
	Replicas  []*rdma.Target // in sync; the first is the primary
	Nodes     []string       // names of their nodes
}

// Options of a check.
type Options struct {
	// Only is the one kind of findings that the report has. Empty: all kinds.
	Only Kind
	// Session says what is known of a session found in a reservation. nil: every
	// session is known and alive.
	Session func(id uint32) SessionState
	// Sessions lists the sessions as they are now; the function answers from that list. nil: every
	// session is alive.
	Sessions func() (func(id uint32) SessionState, error)
	// Complete says whether the regions to check are all that there are now. nil: they are.
	Complete func() (bool, error)
	// Writers says whether any other session can write. nil: none can.
	Writers func() bool
	// Progress is called with the blocks done so far, of all blocks in use. May be nil.
	Progress func(done, total int)
	// Round is called before each round: nothing is under way then, and the check holds
	// no header that it would not read again. May be nil.
	Round func()
	// Pause waits between two looks at a slab that seems wrong. nil: not at all.
	Pause func(attempt int)
	// Object is called for every object that is LIVE and whole. May be nil.
	Object func(Object)
}

// Object is a LIVE object as the check has seen it: Tag is the user's, Bytes those of
// the payload, or of the index of an object of several slabs.
type Object = slab.Seen

// SessionState is what the controllers have recorded of a session.
type SessionState = slab.SessionState

// mayCome says whether a session may still finish what it has begun.
func mayCome(s SessionState) bool {
	return s == slab.SessionLive || s == slab.SessionExpired || s == slab.SessionClosing
}

// looks bounds how often a slab that seems wrong is read again.
const looks = 12

// ErrChanged: the region went to another configuration in the middle. Cluster begins anew where it may.
var ErrChanged = errors.New("region changed its configuration while it was checked: check again")

// Regions checks regions and the references between them.
func Regions(ctx context.Context, regions []Region, o Options) (*Report, error) {
	if o.Session == nil {
		o.Session = func(uint32) SessionState { return slab.SessionLive }
	}
	if o.Sessions == nil {
		o.Sessions = func() (func(uint32) SessionState, error) {
			return func(uint32) SessionState { return slab.SessionLive }, nil
		}
	}
	if o.Complete == nil {
		o.Complete = func() (bool, error) { return true, nil }
	}
	if o.Writers == nil {
		o.Writers = func() bool { return false }
	}
	if o.Progress == nil {
		o.Progress = func(int, int) {}
	}
	if o.Pause == nil {
		o.Pause = func(int) {}
	}
	if o.Round == nil {
		o.Round = func() {}
	}
	c := &check{ctx: ctx, o: o, report: &Report{Findings: []Finding{}, Regions: []RegionReport{}, only: o.Only}, live: map[proto.Ref]*chunk{}}
	most := 1
	for i := range regions {
		most = max(most, len(regions[i].Replicas))
	}
	arena, err := rdma.NewArena((most + 1) * (proto.BlockBytes + 1<<16))
	if err != nil {
		return nil, err
	}
	defer arena.Close()
	for range most {
		b, err1 := arena.Alloc(proto.BlockBytes)
		h, err2 := arena.Alloc(1 << 14)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		c.blocks, c.small = append(c.blocks, b), append(c.small, h)
	}
	if c.maps, err = arena.Alloc(proto.MapBytes); err != nil {
		return nil, err
	}
	if c.words, err = arena.Alloc(16); err != nil {
		return nil, err
	}
	works := make([]*work, 0, len(regions))
	for i := range regions {
		w, err := c.survey(&regions[i])
		if err != nil {
			return nil, err
		}
		works = append(works, w)
		c.total += len(w.used)
	}
	for _, w := range works {
		if err := c.region(w); err != nil {
			return nil, err
		}
	}
	if err := c.chunks(works); err != nil {
		return nil, err
	}
	for _, w := range works {
		c.report.Regions = append(c.report.Regions, w.stat)
	}
	return c.report, nil
}

// check is the state of one check. One goroutine runs it.
type check struct {
	ctx         context.Context
	o           Options
	report      *Report    // grows
	round       rdma.Round // used again for each round
	blocks      [][]byte   // a block of each replica
	small       [][]byte   // headers of each replica
	maps, words []byte     // a map, and words of slabs, as READ

	done, total int                  // blocks checked, and blocks to check; what progress shows
	live        map[proto.Ref]*chunk // LIVE
	indexes     []indexed            // of large objects
}

// chunk is a LIVE slab of a large object.
type chunk struct {
	version uint64
	writer  uint32 // session that wrote it
	named   bool   // by an index that has been read
}

// indexed is the index of a large object.
type indexed struct {
	w       *work // its region
	ref     proto.Ref
	version uint64      // as READ; chunks belong to it
	chunks  []proto.Ref // that it names
}

// work is the check of one region.
type work struct {
	*Region
	stat RegionReport   // counts so far
	g    proto.Geometry // of the region
	seed uint64         // of its checksums
	used []uint32       // blocks that are not FREE
}

// roundTimeout bounds one round: a node whose host has vanished resets no connection,
// and a check must not wait for it for ever.
const roundTimeout = 30 * time.Second

// do sends the check's round. An error ends the check of the region.
func (c *check) do(w *work) error {
	c.o.Round()
	return c.more(w)
}

// more is do of a round that belongs to the one before it: the check still uses a header that was READ there.
func (c *check) more(w *work) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	c.round.Deadline = clock.In(roundTimeout)
	if at, ok := c.ctx.Deadline(); ok {
		c.round.Deadline = min(c.round.Deadline, clock.In(time.Until(at)))
	}
	rdma.Do(&c.round)
	if err := c.round.Err(); err != nil {
		if errors.Is(err, rdma.ErrKey) {
			return fmt.Errorf("region %d: %w", w.ID, ErrChanged)
		}
		return fmt.Errorf("region %d: %w", w.ID, err)
	}
	return nil
}

// find reports a fault. node is the index of the replica; below 0: of the region.
func (c *check) find(w *work, node int, k Kind, where, format string, args ...any) {
	c.report.add(c.finding(w, node, k, where, format, args...))
}

// finding makes a Finding.
func (c *check) finding(w *work, node int, k Kind, where, format string, args ...any) Finding {
	f := Finding{Region: w.ID, Where: where, Kind: k, What: fmt.Sprintf(format, args...)}
	if node >= 0 && node < len(w.Nodes) {
		f.Node = w.Nodes[node]
	}
	return f
}

// survey checks the headers of a region and lists the blocks in use.
func (c *check) survey(r *Region) (*work, error) {
	g, err := proto.NewGeometry(r.Bytes)
	if err != nil {
		return nil, fmt.Errorf("region %d: %w", r.ID, err)
	}
	w := &work{Region: r, g: g, seed: proto.RegionSeed(r.UUID)}
	w.stat = RegionReport{Region: r.ID, Epoch: r.Epoch, Replicas: len(r.Replicas), Blocks: int(g.Blocks)}
	c.round.Reset()
	for i, t := range r.Replicas {
		c.round.Chain(t).Read(0, c.small[i][:proto.RegionHeaderBytes])
	}
	if err := c.do(w); err != nil {
		return nil, err
	}
	for i := range r.Replicas {
		h, err := proto.DecodeRegionHeader(c.small[i])
		switch {
		case err != nil:
			c.find(w, i, KindHeader, "region header", "%v", err)
		case h.UUID != r.UUID || h.Region != r.ID || h.RegionBytes != r.Bytes:
			c.find(w, i, KindHeader, "region header", "is of region %d, %d bytes, uuid %x; the table says %d, %d, %x", h.Region, h.RegionBytes, h.UUID, r.ID, r.Bytes, r.UUID)
		}
	}
	if err := c.headers(w); err != nil {
		return nil, err
	}
	w.stat.BlocksInUse = len(w.used)
	return w, nil
}

// headers compares block headers; those that differ are read again.
func (c *check) headers(w *work) error {
	n := 8 * int(w.g.Blocks)
	c.round.Reset()
	for i, t := range w.Replicas {
		c.round.Chain(t).Read(w.g.HeaderOff(0), c.small[i][:n])
	}
	if err := c.do(w); err != nil {
		return err
	}
	var odd []uint32
	for b := range w.g.Blocks {
		h := proto.Header(proto.Word(c.small[0], 8*int(b)))
		if h.Valid() && h.State() != proto.BlockFree {
			w.used = append(w.used, b)
		}
		if why, _ := c.judgeHeader(w, 8*int(b)); why != "" {
			odd = append(odd, b)
		}
	}
	for attempt := 1; len(odd) > 0; attempt++ {
		c.o.Pause(attempt)
		still := odd[:0]
		for _, b := range odd {
			c.round.Reset()
			for i, t := range w.Replicas {
				c.round.Chain(t).Read(w.g.HeaderOff(b), c.small[i][:8])
			}
			if err := c.do(w); err != nil {
				return err
			}
			why, node := c.judgeHeader(w, 0)
			switch {
			case why == "":
			case attempt == looks:
				c.find(w, node, KindHeader, fmt.Sprintf("block %d", b), "%s", why)
			default:
				still = append(still, b)
			}
		}
		odd = still
	}
	return nil
}

// judgeHeader judges the headers at a place in c.small; "" if they are right. A session that is formatting a block and exists may be fenced: until the
// scrub for it has come, that is no damage, as its reservations are none.
func (c *check) judgeHeader(w *work, at int) (why string, node int) {
	p := proto.Header(proto.Word(c.small[0], at))
	for i := range w.Replicas {
		h := proto.Header(proto.Word(c.small[i], at))
		switch {
		case !h.Valid():
			return fmt.Sprintf("is no header: %#016x", uint64(h)), i
		case h.Session() != 0 && c.o.Session(h.Session()) == slab.SessionGone:
			return fmt.Sprintf("is being formatted by session %d, which does not exist", h.Session()), i
		case h != p && p.State() != proto.BlockFormatting && !reclaiming(p, h): // a formatter finishes, or the scrub for its session does
			return fmt.Sprintf("is %v, the primary has %v", h, p), i
		}
	}
	return "", -1
}

// reclaiming says whether a backup's header may differ from the primary's as it does
// because the block is being taken back, or was when that ended: the next reclaim
// carries on (alloc.Reclaim).
func reclaiming(p, backup proto.Header) bool {
	switch p.State() {
	case proto.BlockDraining:
		return backup == p.With(proto.BlockActive) || backup == proto.MakeHeader(proto.BlockReclaim, p.Kind(), p.Class(), p.Generation()+1, 0)
	case proto.BlockReclaim:
		return backup == proto.MakeHeader(proto.BlockFree, 0, 0, p.Generation(), 0)
	}
	return false
}

// region checks the blocks of a region that are in use. What seems wrong is looked
// at again afterwards, all of it between two pauses.
func (c *check) region(w *work) error {
	var odd []oddSlab
	for _, b := range w.used {
		var err error
		if odd, err = c.block(w, b, odd); err != nil {
			return err
		}
		c.done++
		c.o.Progress(c.done, c.total)
	}
	for attempt := 1; len(odd) > 0; attempt++ {
		c.o.Pause(attempt)
		still := odd[:0]
		for _, x := range odd {
			over, err := c.again(w, &x, attempt)
			if err != nil {
				return err
			}
			if !over {
				still = append(still, x)
			}
		}
		odd = still
	}
	return nil
}
