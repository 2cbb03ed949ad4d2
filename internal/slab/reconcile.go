package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Reconcile makes the replicas of a region alike, step 4 of a failover.
//
// Preconditions: no key of the region is open anywhere, so that plain stores are
// allowed; reg lists the in-sync survivors, the next primary first, and the
// rebuilding ones, flagged.
//
//	per header   the highest generation wins; any RECLAIM is finished; ACTIVE or
//	             DRAINING on all in-sync replicas alike becomes ACTIVE; anything else
//	             was never open and becomes FREE
//	per slab     the highest V with a whole image wins (FREE is whole by itself); its
//	             image goes to all that have another V; reservations are cleared; a
//	             joiner's V that is another is set to 0 for the copier
//	per block    the free map is made again
//
// It can be repeated after any failure: nothing it has done changes what it does.
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
}

// pieceBytes is how much of each replica a scan READs at once.
const pieceBytes = 128 << 10

func (l *Lane) reconcileBlock(reg *Region, block uint32, st *Reconciled) error {
	off := reg.Geometry.HeaderOff(block)
	var was [MaxReplicas]proto.Header
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
	if bug(BugHeaderOfPrimary) {
		h, zero = was[0].With(proto.BlockActive), false
		if !was[0].State().Open() {
			h = proto.MakeHeader(proto.BlockFree, 0, 0, was[0].Generation(), 0)
		}
	}
	if h.State().Open() {
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

// chooseHeader picks the header that all replicas shall have; zero says that the
// block's words are to be cleared.
func chooseHeader(reg *Region, was []proto.Header) (h proto.Header, zero bool) {
	gen, reclaim, alike := uint32(0), false, true
	first := proto.Header(0)
	for i, w := range was {
		if reg.Rebuilding[i] || !w.Valid() {
			alike = alike && reg.Rebuilding[i]
			continue
		}
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
	if alike && !reclaim && first != 0 {
		return first, false
	}
	// A block that every replica says is FREE, and was never formatted in this
	// generation, has nothing to clear: a formatter writes headers only.
	for _, w := range was {
		zero = zero || w != proto.MakeHeader(proto.BlockFree, 0, 0, gen, 0)
	}
	return proto.MakeHeader(proto.BlockFree, 0, 0, gen, 0), zero
}

// plain appends a store of a word, flushed where the region is durable.
func (l *Lane) plain(reg *Region, c *rdma.Chain, off, w uint64, buf []byte) {
	proto.PutWord(buf, 0, w)
	c.Write(off, buf[:8])
	if reg.Durable {
		c.Flush(flushKind, off, 8)
	}
}

// doPlain sends the round, if there is one. Reconcile gives up at the first
// failure: whoever asked for it starts it again, or with fewer replicas.
func (l *Lane) doPlain() error {
	if l.round.Len() == 0 {
		return nil
	}
	l.do()
	return l.round.Err()
}

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
	size := h.Class().Bytes()
	piece := max(pieceBytes, size)
	buf, err := l.buffer(&l.batch.slabs, piece*reg.N)
	if err != nil {
		return err
	}
	words := make([]uint64, h.Class().MapWords())
	for at := 0; at < proto.BlockBytes; at += piece {
		l.round.Reset()
		for i := range reg.N {
			if reg.Fresh[i] {
				clear(buf[i*piece : (i+1)*piece])
				continue
			}
			l.round.Chain(reg.To[i]).Read(reg.Geometry.BlockOff(block)+uint64(at), buf[i*piece:(i+1)*piece])
		}
		if err := l.doPlain(); err != nil {
			return err
		}
		l.round.Reset()
		for i := range reg.N {
			l.round.Chain(reg.To[i])
		}
		for in := 0; in < piece; in += size {
			if l.fixSlab(reg, block, h, (at+in)/size, buf, piece, in, st) {
				words[(at+in)/size/64] |= 1 << ((at + in) / size % 64)
			}
			if err := l.fixFull(reg); err != nil {
				return err
			}
		}
		if reg.Durable && !bug(BugReconcileUnflushed) {
			// Words that are alike may still not be durable everywhere: their writer died
			// before its FLUSH.
			for i := range reg.N {
				l.round.At(i).Flush(flushKind, reg.Geometry.BlockOff(block)+uint64(at), uint64(piece))
			}
		}
		if err := l.sendFixes(); err != nil {
			return err
		}
	}
	return l.writeMap(reg, block, words)
}

// fixFull sends the fixes gathered so far when a chain might not hold another slab's.
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

func (l *Lane) sendFixes() error {
	for i := range l.round.Len() {
		if len(l.round.At(i).Verbs) > 0 {
			return l.doPlain()
		}
	}
	return nil
}

// fixSlab appends what makes one slab alike; taken says whether its map bit is set.
// The stores take their bytes from buf, which has the replicas' pieces.
func (l *Lane) fixSlab(reg *Region, block uint32, h proto.Header, i int, buf []byte, piece, in int, st *Reconciled) (taken bool) {
	s := reg.Geometry.Slab(block, i, h)
	seed := proto.Seed(reg.Seed, s.Off, h.Generation())
	var v [MaxReplicas]proto.V
	var sl [MaxReplicas][]byte
	same := true
	held := false
	at := int(s.ROff() - s.Off)
	for k := range reg.N {
		b := buf[k*piece+in:]
		sl[k] = b[:h.Class().Bytes()]
		r := proto.Word(b, at)
		v[k] = proto.V(proto.Word(b, at+8))
		held = held || r != 0
		same = same && v[k] == v[0]
	}
	if same && v[0] == 0 && !held {
		return false
	}
	// The highest V that is whole wins; ties cannot differ.
	best, src := proto.V(0), -1
	top := proto.V(0)
	var whole [MaxReplicas]bool
	for k := range reg.N {
		if reg.Rebuilding[k] || !v[k].Valid() {
			continue
		}
		whole[k] = true
		if v[k].State() == proto.StateLive {
			ih, _, ok := proto.OpenImage(s.Image(sl[k], v[k].Version()), seed)
			whole[k] = ok && ih.Version == v[k].Version()
		}
		if v[k].Version() >= top.Version() {
			top = v[k]
		}
		if whole[k] && (src < 0 || v[k].Version() > best.Version()) {
			best, src = v[k], k
		}
	}
	if src < 0 {
		// Damaged everywhere: an error for ever, never zeros.
		best = proto.MakeV(proto.StateBad, top.Version())
		st.Bad++
	}
	if !same {
		st.Moved++
	}
	for k := range reg.N {
		c := l.round.At(k)
		w := best
		if reg.Rebuilding[k] {
			if w = v[k]; w != best {
				w = 0
			}
			if bug(BugJoinerUnreconciled) || bug(BugJoinerNotZeroed) {
				w = v[k]
			}
		} else if best.State() == proto.StateLive && (v[k] != best || !whole[k]) {
			img := s.Image(sl[src], best.Version())
			img = img[:proto.ImageLen(proto.ParseImageHeader(img).Length)]
			c.Write(s.ImageOff(best.Version()), img)
			if reg.Durable {
				c.Flush(flushKind, s.ImageOff(best.Version()), uint64(len(img)))
			}
		}
		r := proto.Word(sl[k], at)
		if r != 0 {
			st.Cleared++
		}
		keep := uint64(0)
		if bug(BugReservationsKept) {
			keep = r
		}
		if w != v[k] || r != keep {
			// R and V lie side by side, and what they shall be is written where they stood.
			proto.PutWord(sl[k], at, keep)
			proto.PutWord(sl[k], at+8, uint64(w))
			c.Write(s.ROff(), sl[k][at:at+16])
			if reg.Durable {
				c.Flush(flushKind, s.ROff(), 16)
			}
		}
	}
	return best.State() != proto.StateFree
}

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
