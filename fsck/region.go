package fsck

import (
	"bytes"
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
	ID       uint32
	UUID     [16]byte
	Epoch    uint64
	Bytes    uint64
	Replicas []*rdma.Target // in sync; the first is the primary
	Nodes    []string       // names of their nodes
}

// Options of a check.
type Options struct {
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
	c := &check{ctx: ctx, o: o, report: &Report{Findings: []Finding{}, Regions: []RegionReport{}}, live: map[proto.Ref]*chunk{}}
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

// check is the state of one check.
type check struct {
	ctx         context.Context
	o           Options
	report      *Report
	round       rdma.Round
	blocks      [][]byte // a block of each replica
	small       [][]byte // headers of each replica
	maps, words []byte

	done, total int
	live        map[proto.Ref]*chunk // LIVE
	indexes     []indexed
}

// chunk is a LIVE slab of a large object.
type chunk struct {
	version uint64
	writer  uint32
	named   bool // by an index that has been read
}

// indexed is the index of a large object.
type indexed struct {
	w       *work
	ref     proto.Ref
	version uint64
	chunks  []proto.Ref
}

// work is the check of one region.
type work struct {
	*Region
	stat RegionReport
	g    proto.Geometry
	seed uint64
	used []uint32 // blocks that are not FREE
}

// roundTimeout bounds one round: a node whose host has vanished resets no connection,
// and a check must not wait for it for ever.
const roundTimeout = 30 * time.Second

func (c *check) do(w *work) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	c.o.Round()
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

func (c *check) find(w *work, node int, k Kind, where, format string, args ...any) {
	c.report.add(c.finding(w, node, k, where, format, args...))
}

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

// judgeHeader judges the headers at a place in c.small; "" if they are right.
func (c *check) judgeHeader(w *work, at int) (why string, node int) {
	p := proto.Header(proto.Word(c.small[0], at))
	for i := range w.Replicas {
		h := proto.Header(proto.Word(c.small[i], at))
		switch {
		case !h.Valid():
			return fmt.Sprintf("is no header: %#016x", uint64(h)), i
		case h.Session() != 0 && c.o.Session(h.Session()) == slab.SessionGone:
			return fmt.Sprintf("is being formatted by session %d, which does not exist", h.Session()), i
		case h != p && !(p.State() == proto.BlockFormatting && mayCome(c.o.Session(p.Session()))) && !reclaiming(p, h):
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

// maxOdd bounds the slabs that are looked at again; where more are wrong than
// that, no client is to blame.
const maxOdd = 1 << 16

// oddSlab is a slab that seemed wrong.
type oddSlab struct {
	block uint32
	index int
	h     proto.Header
	v     proto.V // of the primary, when looked at first
}

// block checks one block: one round for its header, map and all replicas of its bytes.
func (c *check) block(w *work, b uint32, odd []oddSlab) ([]oddSlab, error) {
	c.round.Reset()
	for i, t := range w.Replicas {
		ch := c.round.Chain(t)
		if i == 0 {
			ch.Read(w.g.HeaderOff(b), c.words[:8])
			ch.Read(w.g.MapOff(b), c.maps)
		}
		ch.Read(w.g.BlockOff(b), c.blocks[i])
	}
	if err := c.do(w); err != nil {
		return odd, err
	}
	h := proto.Header(proto.Word(c.words, 0))
	if !h.Valid() || !h.State().Open() {
		return odd, nil // not open (any more): its slabs hold nothing valid
	}
	size := h.Class().Bytes()
	for i := range h.Class().Slabs() {
		w.stat.Slabs++
		s := look{h: h, slab: w.g.Slab(b, i, h), taken: taken(c.maps, i)}
		for r := range w.Replicas {
			s.bytes[r] = c.blocks[r][i*size : (i+1)*size]
		}
		switch v := c.judge(w, &s); {
		case v.what == "":
			c.count(w, &s)
		case len(odd) < maxOdd:
			_, pv := s.slab.Words(s.bytes[0])
			odd = append(odd, oddSlab{b, i, h, pv})
		default:
			c.conclude(w, &s, v)
		}
	}
	for i := range proto.MapBytes / 8 {
		if proto.Word(c.maps, 8*i)&^h.Class().MapMask(i) != 0 {
			f := c.finding(w, 0, KindMap, fmt.Sprintf("block %d", b), "word %d of the map has bits beyond its %d slabs", i, h.Class().Slabs())
			f.block, f.inBlock = b, true
			c.report.add(f)
			break
		}
	}
	return odd, nil
}

// again looks at a slab that seemed wrong. over: no further look is needed.
func (c *check) again(w *work, x *oddSlab, attempt int) (over bool, err error) {
	s := look{h: x.h, slab: w.g.Slab(x.block, x.index, x.h)}
	c.round.Reset()
	for r, t := range w.Replicas {
		s.bytes[r] = c.blocks[r][:x.h.Class().Bytes()]
		ch := c.round.Chain(t)
		if r == 0 {
			ch.Read(w.g.HeaderOff(x.block), c.words[:8])
			ch.Read(w.g.MapOff(x.block)+uint64(x.index/64*8), c.words[8:16])
		}
		ch.Read(s.slab.Off, s.bytes[r])
	}
	if err := c.do(w); err != nil {
		return false, err
	}
	if proto.Header(proto.Word(c.words, 0)) != x.h {
		return true, nil // the block has moved on
	}
	s.taken = proto.Word(c.words, 8)>>(x.index%64)&1 == 1
	if r, _ := s.slab.Words(s.bytes[0]); r != 0 {
		for i, t := range w.Replicas {
			if err := c.readShadow(w, t, s.slab, s.h.Generation(), s.bytes[i]); err != nil {
				return false, err
			}
		}
	}
	v := c.judge(w, &s)
	if v.what == "" {
		c.count(w, &s)
		return true, nil
	}
	if attempt < looks {
		return false, nil
	}
	if _, now := s.slab.Words(s.bytes[0]); now != x.v {
		w.stat.Busy++
		return true, nil
	}
	c.conclude(w, &s, v)
	return true, nil
}

// conclude counts or reports a slab that stays wrong.
func (c *check) conclude(w *work, s *look, v verdict) {
	if v.pending {
		w.stat.Pending++
		return
	}
	addr := proto.MakeAddr(w.ID, uint32(s.slab.Off))
	f := c.finding(w, v.node, v.kind, addr.String(), "%s", v.what)
	f.addr, f.ref = addr, c.refOf(w, s)
	f.block, f.inBlock = w.g.BlockOf(s.slab.Off)
	c.report.add(f)
}

// refOf is the reference of the object in a slab, from any replica that has the
// image that V of the primary names; zero if there is none.
func (c *check) refOf(w *work, s *look) proto.Ref {
	_, v := s.slab.Words(s.bytes[0])
	if !v.Valid() || v.State() != proto.StateLive {
		return proto.Ref{}
	}
	gen := s.h.Generation()
	for i := range w.Replicas {
		if h, _, ok := proto.DecodeImage(s.slab.Image(s.bytes[i], v.Version()), proto.Seed(w.seed, s.slab.Off, gen)); ok && h.Version == v.Version() {
			return proto.Ref{Addr: proto.MakeAddr(w.ID, uint32(s.slab.Off)), Incarnation: proto.MakeIncarnation(gen, h.Born)}
		}
	}
	return proto.Ref{}
}

// look is one slab as READ on all replicas.
type look struct {
	h     proto.Header
	slab  proto.Slab
	taken bool
	bytes [slab.MaxListed][]byte
}

// verdict on a slab; what is "" if all is right.
type verdict struct {
	kind    Kind
	what    string
	node    int
	pending bool // no fault while a client that is alive may be about to mend it
}

func taken(m []byte, i int) bool { return proto.Word(m, i/64*8)>>(i%64)&1 == 1 }

// judge says what is wrong with a slab.
func (c *check) judge(w *work, s *look) verdict {
	r, v := s.slab.Words(s.bytes[0])
	if !v.Valid() || !r.Valid() {
		return verdict{kind: KindWord, what: fmt.Sprintf("V %#016x, R %#016x", uint64(v), uint64(r))}
	}
	if r != 0 && c.o.Session(r.Session()) == slab.SessionGone {
		return verdict{kind: KindReservation, what: fmt.Sprintf("reserved by %v, whose session does not exist", r)}
	}
	switch {
	case v.State() == proto.StateBad:
		return verdict{kind: KindImage, what: "BAD: no replica had a whole image"}
	case v.State() == proto.StateFree && r == 0 && s.taken:
		return verdict{kind: KindLeak, what: fmt.Sprintf("taken in the map, %v and unreserved", v), pending: c.o.Writers()}
	case !s.taken && (v.State() == proto.StateLive || r != 0):
		return verdict{kind: KindMap, what: fmt.Sprintf("%v, %v, and free in the map", v, r)}
	}
	atWork := r != 0 // the holder may be in the middle of a commit, or is dead and will be rolled back
	var image []byte
	if v.State() == proto.StateLive {
		var bad verdict
		if s.slab.Kind == proto.Staged {
			if bad = judgeStaged(w, s, r, v); bad.what != "" {
				return bad
			}
		}
		if image, bad = c.image(w, s, v, s.bytes[0], 0); bad.what != "" {
			return bad
		}
	}
	for i := 1; i < len(w.Replicas); i++ {
		_, bv := s.slab.Words(s.bytes[i])
		if bv != v {
			if atWork {
				continue
			}
			return verdict{kind: KindReplica, node: i, what: fmt.Sprintf("V is %v, the primary has %v", bv, v)}
		}
		if image == nil {
			continue
		}
		other := s.slab.Image(s.bytes[i], v.Version())[:len(image)]
		if !bytes.Equal(other, image) {
			if _, bad := c.image(w, s, v, s.bytes[i], i); bad.what != "" {
				return bad
			}
			return verdict{kind: KindReplica, node: i, what: fmt.Sprintf("the image of %v differs from the primary's", v)}
		}
	}
	return verdict{}
}

// image checks the active image of a LIVE slab and returns its bytes.
func (c *check) image(w *work, s *look, v proto.V, slab []byte, node int) ([]byte, verdict) {
	img := s.slab.Image(slab, v.Version())
	h, payload, ok := proto.DecodeImage(img, proto.Seed(w.seed, s.slab.Off, s.h.Generation()))
	switch {
	case !ok:
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("the checksum of the image of %v is wrong", v)}
	case h.Version != v.Version():
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("V is %v, its image has version %d", v, h.Version)}
	case !hasEnvelope(h, payload):
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("the image of %v should be encrypted, and has no envelope", v)}
	case h.Born == 0 || h.Born > h.Version:
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("born %d, version %d", h.Born, h.Version)}
	}
	return img[:proto.ImageLen(len(payload))], verdict{}
}

func hasEnvelope(h proto.ImageHeader, payload []byte) bool {
	_, _, ok := proto.Inner(h.Tag, payload)
	return ok
}

// count adds a slab that is right to the region's figures.
func (c *check) count(w *work, s *look) {
	r, v := s.slab.Words(s.bytes[0])
	if r != 0 && !mayCome(c.o.Session(r.Session())) {
		w.stat.HeldByDead++
	}
	if v.State() != proto.StateLive {
		if r != 0 {
			w.stat.Claimed++
		}
		return
	}
	w.stat.Live++
	if r != 0 {
		w.stat.Held++
	}
	h, payload, ok := proto.DecodeImage(s.slab.Image(s.bytes[0], v.Version()), proto.Seed(w.seed, s.slab.Off, s.h.Generation()))
	if !ok {
		return
	}
	seen := Object{Encrypted: proto.IsEncrypted(h.Tag)}
	if seen.Encrypted {
		w.stat.Encrypted++
		_, e, _ := proto.InnerTag(h.Tag, payload)
		seen.Key = e.Key()
	}
	if h.Tag, payload, ok = proto.Inner(h.Tag, payload); !ok {
		return
	}
	ref := proto.Ref{Addr: proto.MakeAddr(w.ID, uint32(s.slab.Off)), Incarnation: proto.MakeIncarnation(s.h.Generation(), h.Born)}
	if c.o.Object != nil && h.Tag&proto.TagChunk == 0 {
		seen.Ref, seen.Tag, seen.Bytes, seen.Version, seen.Writer = ref, h.Tag&proto.MaxUserTag, len(payload), h.Version, h.Writer.Session()
		c.o.Object(seen)
	}
	switch {
	case h.Tag&proto.TagIndex != 0:
		w.stat.Objects++
		c.indexes = append(c.indexes, indexed{w, ref, h.Version, chunkRefs(payload)})
	case h.Tag&proto.TagChunk != 0:
		w.stat.PayloadBytes += int64(len(payload))
		c.live[ref] = &chunk{version: h.Version, writer: h.Writer.Session()}
	default:
		w.stat.Objects++
		w.stat.PayloadBytes += int64(len(payload))
	}
}
