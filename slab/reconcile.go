package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Reconcile makes the replicas of a region alike, for a new epoch (docs/DESIGN.md#failover).
//
// Preconditions: these replicas have closed every earlier epoch, and the table does not show this
// one OPEN. So only this program has keys, and it may store words with WRITE. reg lists the
// in-sync survivors, the next primary first, and the rebuilding ones, flagged.
//
//	per header   the highest generation wins. ACTIVE or DRAINING alike on all in-sync
//	             replicas becomes ACTIVE. A block that is RECLAIM on some replica becomes FREE; so
//	             does one that is not open on some replica, because its format was cut short
//	per slab     the highest V with a whole image wins (FREE is whole by itself). Its
//	             image goes to all replicas that have another V; reservations are cleared. V of a
//	             rebuilding replica that has another V is set to 0 for the copier
//	per block    the free map is made again
//
// Running it again after any failure gives the same result as running it once.
func (l *Lane) Reconcile(reg *Region) (Reconciled, error) {
	var st Reconciled
	for b := range reg.Geometry.Blocks {
		if err := l.ReconcileBlock(reg, b, &st); err != nil {
			return st, err
		}
	}
	return st, nil
}

// ReconcileBlock is Reconcile of one block. Lanes may work on different blocks side by side.
func (l *Lane) ReconcileBlock(reg *Region, block uint32, st *Reconciled) error {
	if err := l.reconcileBlock(reg, block, st); err != nil {
		return fmt.Errorf("reconcile block %d of region %d: %w", block, reg.ID, err)
	}
	return nil
}

// Reconciled counts what a reconcile has done.
type Reconciled struct {
	Blocks  int // open blocks looked through
	Moved   int // slabs whose V differed somewhere
	Cleared int // reservations
	Bad     int // slabs of which no replica had a whole image
	Alike   int // bytes of replicas that were not READ: a hash showed them to be the primary's
}

// pieceBytes is how many bytes of each replica a scan READs at once; one slab at least.
const pieceBytes = 128 << 10

// reconcileBlock chooses the block's header, makes its slabs alike, and stores the header last.
func (l *Lane) reconcileBlock(reg *Region, block uint32, st *Reconciled) error {
	off := reg.Geometry.HeaderOff(block)
	var was [MaxListed]proto.Header
	l.round.Reset()
	for i := range reg.N {
		l.round.Chain(reg.To[i]).Read(off, l.words[i])
	}
	if err := l.doPlain(); err != nil {
		return err
	}
	for i := range reg.N {
		was[i] = proto.Header(proto.Word(l.words[i], 0))
	}
	h, zero := chooseHeader(reg, was[:reg.N])
	if h.Valid() && h.State().Open() {
		st.Blocks++
		if err := l.reconcileSlabs(reg, block, h, st); err != nil {
			return err
		}
	} else if zero {
		if err := l.zeroBlock(reg, block); err != nil {
			return err
		}
	}
	// The header goes last: until then a repeat finds the same choice.
	l.round.Reset()
	for i := range reg.N {
		if c := l.round.Chain(reg.To[i]); was[i] != h || reg.Durable {
			l.plain(reg, c, off, uint64(h), l.words[i])
		}
	}
	return l.doPlain()
}

// chooseHeader picks the header that all replicas shall have, from those of the in-sync replicas.
// zero: the block's words are to be cleared.
//
// A damaged header is ignored if another replica has a valid one. If all are damaged the block
// keeps the damaged header and its contents, and its readers get ErrCorrupt: a class or
// generation that was made up could make old references name other objects.
func chooseHeader(reg *Region, was []proto.Header) (h proto.Header, zero bool) {
	gen, reclaim, alike, valid := uint32(0), false, true, false
	first := proto.Header(0)
	for i, w := range was {
		if reg.Rebuilding[i] || !w.Valid() {
			continue
		}
		valid = true
		gen = max(gen, w.Generation())
		reclaim = reclaim || w.State() == proto.BlockReclaim
		if !w.State().Open() {
			alike = false
			continue
		}
		if w = w.With(proto.BlockActive); first == 0 {
			first = w
		}
		alike = alike && w == first
	}
	switch {
	case !valid:
		return was[0], false
	case alike && !reclaim:
		return first, false
	}
	// A block that every replica says is FREE, and was never formatted in this
	// generation, has nothing to clear: a formatter writes headers only.
	for _, w := range was {
		zero = zero || w != proto.MakeHeader(proto.BlockFree, 0, 0, gen, 0)
	}
	return proto.MakeHeader(proto.BlockFree, 0, 0, gen, 0), zero
}

// plain appends a WRITE of a word, with a FLUSH where the region is durable. buf is memory for
// the word.
func (l *Lane) plain(reg *Region, c *rdma.Chain, off, w uint64, buf []byte) {
	proto.PutWord(buf, 0, w)
	c.Write(off, buf[:8])
	if reg.Durable {
		c.Flush(flushKind, off, 8)
	}
}

// doPlain sends the round, unless it is empty. Reconcile gives up at the first failure: the
// caller starts it again, or with fewer replicas.
func (l *Lane) doPlain() error {
	if l.round.Len() == 0 {
		return nil
	}
	l.do()
	return l.round.Err()
}

// zeroBlock clears a block and its map on every replica.
func (l *Lane) zeroBlock(reg *Region, block uint32) error {
	zero, err := l.buffer(&l.slab, pieceBytes)
	if err != nil {
		return err
	}
	clear(zero)
	for at := uint64(0); at < proto.BlockBytes; at += pieceBytes {
		l.round.Reset()
		for i := range reg.N {
			c := l.round.Chain(reg.To[i])
			if at == 0 {
				c.Write(reg.Geometry.MapOff(block), zero[:proto.MapBytes])
			}
			c.Write(reg.Geometry.BlockOff(block)+at, zero)
			if reg.Durable {
				c.Flush(flushKind, reg.Geometry.BlockOff(block)+at, pieceBytes)
			}
		}
		if err := l.doPlain(); err != nil {
			return err
		}
	}
	return nil
}

// reconcileSlabs looks through an open block, piece by piece.
func (l *Lane) reconcileSlabs(reg *Region, block uint32, h proto.Header, st *Reconciled) error {
	class := h.Class()
	size, piece := class.Bytes(), class.PieceBytes(pieceBytes)
	buf, err := l.buffer(&l.batch.slabs, piece*reg.N)
	if err != nil {
		return err
	}
	words := make([]uint64, class.MapWords())
	for at, n := 0, 0; at < class.UsedBytes(); at += n {
		n = min(piece, class.UsedBytes()-at)
		// In a STAGED block homes are written next: V and the records that lead to it must not be lost then.
		thenFlush := reg.Durable && h.Kind() == proto.Staged
		if err := l.readAlike(reg, reg.Geometry.BlockOff(block)+uint64(at), uint64(n), buf, piece, thenFlush, st); err != nil {
			return err
		}
		l.round.Reset()
		for i := range reg.N {
			l.round.Chain(reg.To[i])
		}
		for in, i := 0, class.SlabOf(at); in < n; in, i = in+size, i+1 {
			taken, err := l.fixSlab(reg, block, h, i, buf, piece, in, st)
			if err != nil {
				return err
			}
			if taken {
				words[i/64] |= 1 << (i % 64)
			}
			if err := l.fixFull(reg); err != nil {
				return err
			}
		}
		if reg.Durable {
			// Words that are alike may still not be durable everywhere: their writer died
			// before its FLUSH.
			for i := range reg.N {
				l.round.At(i).Flush(flushKind, reg.Geometry.BlockOff(block)+uint64(at), uint64(n))
			}
		}
		if err := l.sendFixes(); err != nil {
			return err
		}
	}
	return l.writeMap(reg, block, words)
}

// fixFull sends the fixes gathered so far when a chain may have no room for those of another
// slab.
func (l *Lane) fixFull(reg *Region) error {
	for i := range l.round.Len() {
		if len(l.round.At(i).Verbs) > rdma.MaxChainVerbs-8 {
			if err := l.sendFixes(); err != nil {
				return err
			}
			l.round.Reset()
			for i := range reg.N {
				l.round.Chain(reg.To[i])
			}
			return nil
		}
	}
	return nil
}

// sendFixes sends the round if any of its chains has a verb.
func (l *Lane) sendFixes() error {
	for i := range l.round.Len() {
		if len(l.round.At(i).Verbs) > 0 {
			return l.doPlain()
		}
	}
	return nil
}

// fixSlab appends the stores that make slab i of a block alike on all replicas. taken: its map
// bit is to be set. buf has piece bytes of the block of each replica; the slab is at offset in of
// each. The stores take their bytes from buf.
func (l *Lane) fixSlab(reg *Region, block uint32, h proto.Header, i int, buf []byte, piece, in int, st *Reconciled) (taken bool, err error) {
	c := copiesOf(reg, reg.Geometry.Slab(block, i, h), h.Generation(), buf, piece, in)
	if c.unused() {
		return false, nil
	}
	if err := l.readShadows(&c); err != nil {
		return false, err
	}
	best, from := c.choose()
	if from < 0 {
		st.Bad++
	}
	if !c.alike() {
		st.Moved++
	}
	for k := range reg.N {
		l.fixReplica(&c, k, best, from, st)
	}
	return best.State() != proto.StateFree, nil
}

// slabCopies is one slab as READ at every replica of a region. The arrays are indexed by replica.
type slabCopies struct {
	reg   *Region
	slab  proto.Slab
	bytes [MaxListed][]byte // the slab; fixReplica writes from it
	r     [MaxListed]proto.R
	v     [MaxListed]proto.V // settled
	// whole: V is FREE, or names an image that is whole. Never set for a rebuilding
	// replica: its images are not used.
	whole [MaxListed]bool
	// open: V was open there.
	open [MaxListed]bool
	// away: home of a STAGED slab is not the image that V names; bytes has it where whole is set.
	away [MaxListed]bool
	seed uint64 // of the checksums of its images
}

// copiesOf finds a slab in buf; see fixSlab.
func copiesOf(reg *Region, s proto.Slab, generation uint32, buf []byte, piece, in int) slabCopies {
	c := slabCopies{reg: reg, slab: s, seed: proto.Seed(reg.Seed, s.Off, generation)}
	for k := range reg.N {
		c.bytes[k] = buf[k*piece+in:][:s.Class.Bytes()]
		if c.r[k], c.v[k] = s.Words(c.bytes[k]); reg.OpenWords && s.Kind != proto.Staged {
			c.open[k], c.v[k] = c.v[k].IsOpen(), c.v[k].Settled()
		}
		if reg.Rebuilding[k] || !c.v[k].Valid() {
			continue
		}
		c.whole[k] = true
		switch v := c.v[k]; {
		case v.State() != proto.StateLive:
		case s.Kind == proto.Staged:
			_, _, from := s.Compose(c.bytes[k], v.Version(), c.seed)
			c.away[k] = from != proto.FromHome
			c.whole[k] = from == proto.FromHome || from == proto.FromRecord
		default:
			h, _, ok := proto.DecodeImage(s.Image(c.bytes[k], v.Version()), c.seed)
			c.whole[k] = ok && h.Version == v.Version()
		}
	}
	return c
}

// readShadows READs the images of a STAGED slab that are in shadows. It uses a round of its own,
// because the lane's round is being built.
func (l *Lane) readShadows(c *slabCopies) error {
	for k := range c.reg.N {
		if !c.away[k] || c.whole[k] {
			continue
		}
		off, n, ok := c.slab.ShadowOff(c.slab.LocatorIn(c.bytes[k]), c.reg.Geometry.RegionBytes)
		if !ok {
			continue
		}
		img, err := l.buffer(&l.image, n)
		if err != nil {
			return err
		}
		var r rdma.Round
		r.Chain(c.reg.To[k]).Read(off, img)
		l.port.Do(&r)
		l.tally.Count(&r)
		if err := r.Err(); err != nil {
			return err
		}
		if h, _, ok := proto.DecodeImage(img, c.seed); ok && h.Version == c.v[k].Version() {
			copy(c.bytes[k][proto.StagedLead:], img)
			c.whole[k] = true
		}
	}
	return nil
}

// leftover is the version that L of a STAGED slab at replica k is to say is taken; ok is false if L may stay as it is.
//
// A record above V, which nothing has committed, stands in the slab until a later one covers it, also where L
// does not lead to it. A READ of the new epoch can bring it together with V and L of a later change: so no change gets its
// version. A shadow is READ behind V, so its version can be given again; L must not lead there then.
//
// Where home is not the image of V, L leads to the only whole copy, and stays: its session held R, so no
// other one has made a record since.
func (c *slabCopies) leftover(k int, best proto.V) (version uint64, ok bool) {
	if c.slab.Kind != proto.Staged || c.reg.Rebuilding[k] || c.away[k] || best.State() != proto.StateLive {
		return 0, false
	}
	lead := c.slab.LocatorIn(c.bytes[k])
	version = c.slab.RecordAbove(c.bytes[k], best.Version(), c.seed)
	return max(version, best.Version()), version > lead.Gone() || lead.Kind() == proto.RecordShadow
}

// alike reports that all replicas have the same V.
func (c *slabCopies) alike() bool {
	for k := range c.reg.N {
		if c.v[k] != c.v[0] {
			return false
		}
	}
	return true
}

// unused reports that R and V are 0 on every replica.
func (c *slabCopies) unused() bool {
	for k := range c.reg.N {
		if c.r[k] != 0 || c.v[k] != 0 {
			return false
		}
	}
	return true
}

// choose returns the V that all replicas shall have: the highest V with a whole image; and a
// replica that has the image. Two replicas with the same V have the same image. A slab that is
// whole nowhere becomes BAD, and from is -1: its readers get ErrCorrupt until it is restored, never zeros. The mark is above
// every version that a replica shows (B6).
func (c *slabCopies) choose() (best proto.V, from int) {
	top := proto.V(0)
	from = -1
	for k := range c.reg.N {
		v := c.v[k]
		if c.reg.Rebuilding[k] || !v.Valid() {
			continue
		}
		if v.Version() >= top.Version() {
			top = v
		}
		if c.whole[k] && (from < 0 || v.Version() > best.Version()) {
			best, from = v, k
		}
	}
	if from < 0 {
		k := min(c.above(top.Version())+1, proto.MaxVersion-maxSpare)
		best = proto.MakeV(proto.StateBad, max(k, top.Version()))
	}
	return best, from
}

// fixReplica appends the stores for replica k. V of a rebuilding replica that differs is set to
// 0, so that the copier copies the slab.
func (l *Lane) fixReplica(s *slabCopies, k int, best proto.V, from int, st *Reconciled) {
	c, v := l.round.At(k), best
	switch {
	case s.reg.Rebuilding[k]:
		if s.v[k] != best {
			v = 0
		}
	case best.State() == proto.StateLive && (s.v[k] != best || !s.whole[k] || s.away[k]):
		img := s.slab.Image(s.bytes[from], best.Version())
		img = img[:proto.ImageLen(proto.ParseImageHeader(img).Length)]
		c.Write(s.slab.ImageOff(best.Version()), img)
		if s.reg.Durable {
			c.Flush(flushKind, s.slab.ImageOff(best.Version()), uint64(len(img)))
		}
	}
	if version, ok := s.leftover(k, best); ok {
		at := int(s.slab.LOff() - s.slab.Off)
		proto.PutWord(s.bytes[k], at, uint64(proto.MakeGone(version)))
		c.Write(s.slab.LOff(), s.bytes[k][at:at+8])
		if s.reg.Durable {
			c.Flush(flushKind, s.slab.LOff(), 8)
		}
	}
	if k == 0 {
		l.burnFor(s, best)
	}
	if s.r[k] != 0 {
		st.Cleared++
	}
	if v == s.v[k] && s.r[k] == 0 && !s.open[k] {
		return
	}
	// R and V lie side by side, and are written from the place where they were READ to.
	at := int(s.slab.ROff() - s.slab.Off)
	proto.PutWord(s.bytes[k], at, 0)
	proto.PutWord(s.bytes[k], at+8, uint64(v))
	c.Write(s.slab.ROff(), s.bytes[k][at:at+16])
	if s.reg.Durable {
		c.Flush(flushKind, s.slab.ROff(), 16)
	}
}

// burnFor appends the WRITE of what any replica has seen of a version above best, where words are open, to the chain of the
// new primary (O4): an image of it may stand at a replica whose V will have that version again. Versions in V alone need
// none: every V is set to best, and READs of the epoch before have ended.
func (l *Lane) burnFor(s *slabCopies, best proto.V) {
	if !s.reg.OpenWords || s.slab.Kind != proto.Pair || best.State() != proto.StateLive { // B5: who takes a mark away looks at all replicas
		return
	}
	other := s.slab.Image(s.bytes[0], best.Version()+1)
	left, most := proto.ParseImageHeader(other).Version, uint64(0)
	for k := range s.reg.N {
		for place := range uint64(2) {
			if n := proto.ParseImageHeader(s.slab.Image(s.bytes[k], place)).Version; n < best.Version()+maxSkip {
				most = max(most, n)
			}
		}
	}
	if most <= best.Version() || left >= most && left < best.Version()+maxSkip {
		return
	}
	c, off := l.round.At(0), s.slab.ImageOff(best.Version()+1)
	c.Write(off, proto.Burn(other, most))
	if s.reg.Durable {
		c.Flush(flushKind, off, proto.BurntBytes)
	}
}

// writeMap stores the free map of a block on every replica.
func (l *Lane) writeMap(reg *Region, block uint32, words []uint64) error {
	buf, err := l.buffer(&l.slab, proto.MapBytes)
	if err != nil {
		return err
	}
	clear(buf)
	for i, w := range words {
		proto.PutWord(buf, 8*i, w)
	}
	l.round.Reset()
	for i := range reg.N {
		c := l.round.Chain(reg.To[i])
		c.Write(reg.Geometry.MapOff(block), buf)
		if reg.Durable {
			c.Flush(flushKind, reg.Geometry.MapOff(block), proto.MapBytes)
		}
	}
	return l.doPlain()
}
