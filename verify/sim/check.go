package sim

import (
	"fmt"
	"strings"

	"github.com/quarrystore/quarry/proto"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// checker checks every verb against the invariants of package slab, at the moment at which the
// fabric executes it. It compares memory with the committed decisions of the mirror.
type checker struct {
	w      *world
	hot    uint64     // word changed last
	regs   []register // one for each object that has lived, with its first value
	values uint64     // given out by value
	pos    []uint64   // scratch of linear: the place of each operation of the history
	img    []byte     // scratch of whole
	slab   []byte     // scratch of composed
	lost   bool       // power has been lost in this schedule
	lostAt int64      // step of the loss
	// held counts the slabs that each session has reserved at the primary in this epoch.
	held [maxSessions]int
	// told has a bit for each epoch that a table has shown as open, by region. Clients have
	// keys of no other epoch.
	told [lastID + 1][maxTold / 64]uint64
}

// maxTold bounds the epochs that told can hold.
const maxTold = 4096

// tell notes that a table shows an epoch as open.
func (k *checker) tell(region uint32, epoch uint64) {
	if epoch >= maxTold {
		k.w.fail("too many epochs", fmt.Sprint(epoch))
		return
	}
	k.told[region][epoch/64] |= 1 << (epoch % 64)
}

func (k *checker) reset() {
	k.hot, k.values, k.lost, k.lostAt = 0, 0, false, 0
	k.held = [maxSessions]int{}
	k.told = [lastID + 1][maxTold / 64]uint64{}
	k.tell(regionID, 1)
	k.tell(farID, 1)
}

// opened counts the reservations at the beginning of an epoch; there should be none. It checks
// that V of every object is durable on every replica in sync.
func (k *checker) opened() {
	k.held = [maxSessions]int{}
	k.tell(regionID, k.w.mirror.table.epoch)
	p := k.w.mem(k.w.mirror.table.node[0])
	for i := range k.w.objs {
		if s, _, ok := k.place(p, uint64(k.regs[k.w.objs[i].refs[0]].ref.Addr.Off())); ok {
			if r := proto.R(p.Word(s.ROff())); r != 0 && r.Session() < maxSessions {
				k.held[r.Session()]++
			}
			k.flushed(s)
		}
	}
}

// flushed checks that V of a slab is durable when an epoch begins: clients take what they find for
// durable.
func (k *checker) flushed(s proto.Slab) {
	w, t := k.w, &k.w.mirror.table
	for i := range t.n {
		nd := w.fab.Nodes()[t.node[i]]
		if w.opt.Durable && !t.rebuilding[i] && nd.Up && nd.Incarnation == t.incarnation[i] && w.mem(t.node[i]).Dirty(s.VOff(), 8) {
			w.fail("an epoch begins with V unflushed", fmt.Sprintf("%#x at node %d, epoch %d", s.Off, nd.ID, t.epoch))
		}
	}
}

// power is called at a loss of power: unflushed bytes may be lost.
func (k *checker) power() {
	k.lost, k.lostAt = true, int64(k.w.steps)
	k.w.mirror.powered()
}

// value returns a value that the schedule has not used before.
func (k *checker) value(client int) uint64 {
	k.values++
	return k.values<<8 | uint64(client)
}

// place finds the slab of an offset, by the block header at the primary.
func (k *checker) place(p *fabric.Memory, off uint64) (s proto.Slab, seed uint64, ok bool) {
	w := k.w
	b, ok := w.geo.BlockOf(off)
	if !ok {
		return s, 0, false
	}
	h := proto.Header(p.Word(w.geo.HeaderOff(b)))
	gen := h.Generation()
	switch {
	case h.State() == proto.BlockReclaim && gen > 0:
		gen-- // reservations of the generation before are still being released
	case !h.State().Open():
		return s, 0, false
	}
	i := h.Class().SlabOf(int(off - w.geo.BlockOff(b)))
	if i >= h.Class().Slabs() {
		return s, 0, false // the bytes behind the last slab
	}
	s = w.geo.Slab(b, i, h)
	return s, proto.Seed(w.uid, s.Off, gen), true
}

// watched reports whether the checks apply to m: it serves in the present configuration.
func (k *checker) watched(m *fabric.Memory, session uint32) (place int, p *fabric.Memory, ok bool) {
	t := &k.w.mirror.table
	if session == fabric.Agent || m.Region != regionID || !t.open || m.Epoch != t.epoch {
		return 0, nil, false
	}
	place, ok = k.w.mirror.in(int(m.Node.ID - 1))
	if !ok || t.incarnation[place] != m.Node.Incarnation {
		return 0, nil, false
	}
	return place, k.w.mem(t.node[0]), true
}

// Ran checks that no verb of a session runs after the certificate of its fence.
func (k *checker) Ran(m *fabric.Memory, session uint32) {
	if session == fabric.Agent {
		return
	}
	if sc := k.w.opt.Script; sc != nil {
		sc.ran(k.w, k.w.mirror.sess[session].client)
	}
	s := &k.w.mirror.sess[session]
	forgotten := s.state == sessionFree && !s.closing // it was fenced before
	if s.state == sessionFenced || s.proven[m.Region] || forgotten {
		_, in := k.w.mirror.in(int(m.Node.ID - 1))
		if m.Region == regionID && in || k.shared(m) {
			k.w.fail("a verb ran after the fence", fmt.Sprintf("session %d at node %d", session, m.Node.ID))
		}
	}
}

// shared reports whether a replica of the present configuration, m or another, serves the
// epoch that m serves. The checks then apply to m even if its node has left the
// configuration, because a client with the old table reaches both. A region that is LOST is left out:
// what of it a replica that was being rebuilt still serves is read by nobody, and no fence waits for it.
func (k *checker) shared(m *fabric.Memory) bool {
	t := k.w.tableOf(m.Region)
	if t.lost {
		return false
	}
	if k.told[m.Region][m.Epoch/64%(maxTold/64)]>>(m.Epoch%64)&1 == 0 {
		return false // agents alone have keys
	}
	for i := range t.n {
		nd := k.w.fab.Nodes()[t.node[i]]
		o := nd.Memory(m.Region)
		if m.IsOpen() && o.IsOpen() && o.Epoch == m.Epoch && nd.Incarnation == t.incarnation[i] {
			return true
		}
	}
	return false
}

// certified is called when a fence is complete in a region; 0 stands for all regions. It
// checks that no node that serves an epoch of the present configuration admits the session,
// even if no verb of the session arrives.
func (k *checker) certified(id, region uint32) {
	w := k.w
	for i, nd := range w.fab.Nodes()[:w.d.nodes] {
		if !nd.Up || nd.Revoked(id) || w.mach.refuses(i, w.mirror.sess[id].serial) {
			continue
		}
		for r := uint32(regionID); r <= lastID; r++ {
			m := nd.Memory(r)
			if (region == 0 || region == r) && m != nil && k.shared(m) {
				w.fail("a certificate while a node admits the session", fmt.Sprintf("session %d at node %d, which serves epoch %d of region %d; %s",
					id, nd.ID, m.Epoch, r, tableString(w.tableOf(r))))
			}
		}
	}
}

// stillCertified is called when a configuration opens. It checks that none of its nodes admits
// a session whose fence was complete before.
func (k *checker) stillCertified(region uint32) {
	for id := range k.w.mirror.sess {
		if s := &k.w.mirror.sess[id]; s.state == sessionFenced || s.state == sessionFencing && s.proven[region] {
			k.certified(uint32(id), region)
		}
	}
}

// forgotten is called when the record of a session is deleted. It checks that the id may be
// used again: no node that clients use admits the session, and no slab is reserved under the
// id. A closed session has no reservations; nodes that are lost learn of its end later. One
// transaction may close the session and delete its record.
func (k *checker) forgotten(id uint32) {
	s, t := &k.w.mirror.sess[id], &k.w.mirror.table
	if s.closing || s.state == sessionLive {
		return
	}
	k.certified(id, 0)
	if t.open && k.held[id] != 0 {
		k.w.fail("an id is free while a slab is reserved under it", fmt.Sprintf("session %d, serial %d: %d slabs in epoch %d", id, s.serial, k.held[id], t.epoch))
	}
}

// Swapped checks a change of a word.
func (k *checker) Swapped(m *fabric.Memory, session uint32, off, old, new uint64) {
	w := k.w
	w.mix(off<<32 ^ new ^ uint64(m.Node.ID))
	k.hot = off
	place, p, ok := k.watched(m, session)
	if !ok {
		return
	}
	if place == 0 && off < w.geo.MapOff(0) {
		if st := proto.Header(new).State(); st == proto.BlockFormatting || st == proto.BlockReclaim {
			w.trigger(onHeader)
		}
	}
	if b := off - w.geo.HeaderOff(0); w.opt.Durable && off < w.geo.MapOff(0) && proto.Header(new).State() == proto.BlockFree {
		if b /= w.geo.HeaderOff(1) - w.geo.HeaderOff(0); m.Dirty(w.geo.BlockOff(uint32(b)), proto.BlockBytes) {
			w.fail("a block is free before its zeros are durable", fmt.Sprintf("block %d at node %d", b, m.Node.ID))
			return
		}
	}
	s, seed, ok := k.place(p, off)
	if !ok {
		return
	}
	switch off {
	case s.ROff():
		k.reserved(m, place, session, s, proto.R(old), proto.R(new))
		if new == 0 && s.Kind == proto.Staged {
			k.released(s, seed)
		}
	case s.VOff():
		k.moved(m, place, session, s, seed, proto.V(old), proto.V(new))
	default:
		w.fail("CAS inside an image", fmt.Sprintf("session %d at node %d, offset %#x", session, m.Node.ID, off))
	}
}

// reserved checks a change of R.
func (k *checker) reserved(m *fabric.Memory, place int, session uint32, s proto.Slab, old, new proto.R) {
	w := k.w
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	if place != 0 {
		w.fail("R of a backup changed", addr.String())
		return
	}
	if old.Session() < maxSessions && new.Session() < maxSessions {
		k.held[old.Session()]--
		k.held[new.Session()]++
	}
	switch {
	case new == 0 && old.Session() != session:
		w.fail("released what is not its own", fmt.Sprintf("%v: session %d released %v", addr, session, old))
	case new != 0 && new.Session() != session:
		w.fail("reserved in another's name", fmt.Sprintf("%v: session %d wrote %v", addr, session, new))
	case new != 0 && old != 0 && !w.mirror.certified(old.Session()):
		w.fail("two holders", fmt.Sprintf("%v: session %d took over from %v, whose fence is not certified", addr, session, old))
	case new == 0 && w.opens(s):
		if v := proto.V(m.Word(s.VOff())); v.IsOpen() {
			w.fail("released before V is settled", fmt.Sprintf("%v: %v", addr, v))
		}
	case new == 0 && w.opt.Durable && m.Dirty(s.VOff(), 8):
		w.fail("released before V is durable", addr.String())
	}
}

// moved checks a change of V of the replica at place. Only the session that R of the primary names
// may make it; the copier may also move V of a FREE slab of a rebuilding replica.
func (k *checker) moved(m *fabric.Memory, place int, session uint32, s proto.Slab, seed uint64, old, new proto.V) {
	w := k.w
	t := &w.mirror.table
	if w.opens(s) {
		k.movedOpen(m, place, session, s, seed, old, new)
		return
	}
	p := w.mem(t.node[0])
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	holder := proto.R(p.Word(s.ROff()))
	copying := t.rebuilding[place] && (new.State() == proto.StateFree || new.State() == proto.StateBad && (w.excused(s.Off) || w.opt.Bad))
	if holder.Session() != session && !copying {
		w.fail("V changed by a session that does not hold R", fmt.Sprintf("%v at node %d: session %d changed %v to %v, holder %v", addr, m.Node.ID, session, old, new, holder))
		return
	}
	if new.State() == proto.StateBad && !copying && new.Version() > old.Version() {
		k.marked(m, s, seed, old, new)
	}
	if place != 0 {
		if new.State() == proto.StateLive && !t.rebuilding[place] && !w.rots(t.node[place]) && !w.excused(s.Off) && !w.isHurt(s.Off, new.Version()) && !k.whole(m, s, seed, new) {
			w.fail("V of a backup names no whole image", fmt.Sprintf("%v at node %d: session %d, %v", addr, m.Node.ID, session, new))
		}
		return
	}
	if new.Version() <= old.Version() {
		w.fail("V fell at the primary", fmt.Sprintf("%v: %v to %v", addr, old, new))
		return
	}
	k.committed(s, seed, addr, new)
}

// committed checks a commit, which is the change of V at the primary: every in-sync replica has
// the new V and, for a LIVE one, its image, both durable where durability is asked for.
func (k *checker) committed(s proto.Slab, seed uint64, addr proto.Addr, new proto.V) {
	w := k.w
	t := &w.mirror.table
	if (w.opt.Batches || w.opt.Bad) && new.State() == proto.StateLive {
		k.whole(w.mem(t.node[0]), s, seed, new)
		w.wroteBlindly(proto.Word(k.img, proto.ImageHeaderBytes), new.Version())
		w.noteValue(s.Off, proto.Word(k.img, proto.ImageHeaderBytes), new.Version())
	}
	for i := range t.n {
		if t.rebuilding[i] {
			continue
		}
		b := w.mem(t.node[i])
		if !w.fab.Nodes()[t.node[i]].Up || w.fab.Nodes()[t.node[i]].Incarnation != t.incarnation[i] {
			continue
		}
		if v := proto.V(b.Word(s.VOff())); v != new {
			w.fail("committed before a backup", fmt.Sprintf("%v: primary %v, node %d has %v", addr, new, b.Node.ID, v))
			return
		}
		if new.State() == proto.StateLive && !w.rots(t.node[i]) && !k.whole(b, s, seed, new) {
			w.fail("committed without its image", fmt.Sprintf("%v at node %d: %v", addr, b.Node.ID, new))
			return
		}
		if w.opt.Durable && (i > 0 && b.Dirty(s.VOff(), 8) || new.State() == proto.StateLive && k.volatile(b, s, seed, new)) {
			w.fail("committed before it is durable", fmt.Sprintf("%v at node %d: %v", addr, b.Node.ID, new))
			return
		}
	}
}

// imageBytes is the length of the image that v names.
func (k *checker) imageBytes(m *fabric.Memory, s proto.Slab, v proto.V) uint64 {
	if k.w.tree == nil {
		return uint64(proto.ImageHeaderBytes + k.w.d.payload)
	}
	n := m.Word(s.ImageOff(v.Version())+8) >> proto.VersionBits
	return min(proto.ImageHeaderBytes+n, uint64(s.Class.ImageBytes(s.Kind)))
}

// whole reports whether the image that v names is intact.
func (k *checker) whole(m *fabric.Memory, s proto.Slab, seed uint64, v proto.V) bool {
	if s.Kind == proto.Staged {
		_, ok := k.composed(m, s, seed, v)
		return ok
	}
	n := int(k.imageBytes(m, s, v))
	if cap(k.img) < n {
		k.img = make([]byte, max(n, proto.ImageHeaderBytes+maxPayload))
	}
	k.img = k.img[:n]
	img := k.img
	m.Load(s.ImageOff(v.Version()), img)
	h, _, ok := proto.DecodeImage(img, seed)
	return ok && h.Version == v.Version()
}

// Wrote checks a piece of a WRITE.
func (k *checker) Wrote(m *fabric.Memory, session uint32, off, n uint64) {
	w := k.w
	w.mix(off<<32 ^ n ^ uint64(m.Node.ID)<<8)
	place, p, ok := k.watched(m, session)
	if !ok {
		return
	}
	s, seed, ok := k.place(p, off)
	if b, _ := w.geo.BlockOf(off); !ok || proto.Header(p.Word(w.geo.HeaderOff(b))).State() == proto.BlockReclaim {
		return // being zeroed
	}
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	if off < s.VOff()+8 && off+n > s.ROff() {
		w.fail("a WRITE reached R or V", addr.String())
		return
	}
	if holder := proto.R(p.Word(s.ROff())); holder.Session() != session {
		w.fail("WRITE by a session that does not hold R", fmt.Sprintf("%v at node %d: session %d, holder %v", addr, m.Node.ID, session, holder))
		return
	}
	if s.Kind == proto.Staged {
		k.staged(m, place, session, s, seed)
	}
	if w.opens(s) {
		k.wroteOpen(m, place, session, s, seed, off, n)
		return
	}
	if w.mirror.table.rebuilding[place] || s.Kind != proto.Pair {
		return
	}
	v := proto.V(p.Word(s.VOff()))
	if at := s.ImageOff(v.Version()); v.State() == proto.StateLive && off+n > at && off < at+uint64(s.Class.ImageBytes(s.Kind)) && !w.rots(int(m.Node.ID-1)) {
		w.fail("the active image was written", fmt.Sprintf("%v at node %d: session %d, %v", addr, m.Node.ID, session, v))
	}
}

// quiet reports whether nothing is in progress in the healed cluster.
func (w *world) quiet() bool {
	k := &w.mirror
	if w.mach.orders.removed {
		return w.mach.swept
	}
	if !k.table.open || !w.mach.swept || !w.clientsDone() || k.table.n < w.mach.wantReplicas() {
		return false
	}
	for i := range k.table.n {
		if k.table.rebuilding[i] || w.fab.Nodes()[k.table.node[i]].Incarnation != k.table.incarnation[i] {
			return false
		}
	}
	for id := range k.sess {
		s := &k.sess[id]
		switch s.state {
		case sessionFencing, sessionFenced:
			if !k.mayRest(s) {
				return false
			}
		case sessionLive:
			if c := &w.clients[s.client]; s.client < maxClients || c.state != procIdle || c.session != uint32(id) || c.ended {
				return false
			}
		}
	}
	// A reclaim that ended in the middle, because its session did, is begun again.
	return len(w.halfReclaimed()) == 0
}

func (w *world) whoWaits() string {
	var b strings.Builder
	for i := range w.clients {
		if c := &w.clients[i]; c.state != procIdle {
			fmt.Fprintf(&b, "client %d state %d session %d waits %d; ", i, c.state, c.session, c.waits)
		}
	}
	fmt.Fprintf(&b, "swept %v, %s", w.mach.swept, tableString(&w.mirror.table))
	for id := range w.mirror.sess {
		if s := &w.mirror.sess[id]; s.state != sessionFree {
			fmt.Fprintf(&b, "; session %d state %d client %d", id, s.state, s.client)
		}
	}
	return b.String()
}

// finalChecks checks the healed and scrubbed memory, and the histories.
func (w *world) finalChecks() {
	k, t := &w.check, &w.mirror.table
	if w.mach.orders.removed { // with all its objects
		w.linear()
		return
	}
	p := w.mem(t.node[0])
	for b := range w.geo.Blocks {
		h := proto.Header(p.Word(w.geo.HeaderOff(b)))
		for i := 1; i < t.n; i++ {
			if o := proto.Header(w.mem(t.node[i]).Word(w.geo.HeaderOff(b))); o != h {
				w.fail("replicas differ", fmt.Sprintf("header of block %d: %v at the primary, %v at node %d", b, h, o, t.node[i]+1))
				return
			}
		}
		if h.State() == proto.BlockFree {
			for i := range t.n {
				if m := w.mem(t.node[i]); !m.Clean(w.geo.BlockOff(b), proto.BlockBytes) {
					w.fail("a free block has something in it", fmt.Sprintf("block %d at node %d: %v", b, m.Node.ID, h))
					return
				}
			}
			continue
		}
		if h.State() != proto.BlockActive {
			w.fail("block left over", fmt.Sprintf("block %d is %v", b, h))
			return
		}
		w.checkBlock(b, h)
	}
	if w.failed != nil {
		return
	}
	if w.tree != nil {
		w.tree.check()
		return
	}
	// Every object's last state is part of its history.
	for r := range k.regs {
		w.finalRead(r)
	}
	w.linear()
}

// leakedBit finds a slab that has no object and no reservation and is marked as taken.
const leakedBit = "leak of a free slab"

func (w *world) checkBlock(b uint32, h proto.Header) {
	k, t := &w.check, &w.mirror.table
	p := w.mem(t.node[0])
	// Only pages that were touched can hold anything: look at the slabs in use.
	for i := range h.Class().Slabs() {
		if i%64 == 0 && w.untouched(b, h, i) {
			continue
		}
		s := w.geo.Slab(b, i, h)
		seed := proto.Seed(w.uid, s.Off, h.Generation())
		v := proto.V(p.Word(s.VOff()))
		addr := proto.MakeAddr(regionID, uint32(s.Off))
		if r := proto.R(p.Word(s.ROff())); r != 0 {
			w.fail("leak", fmt.Sprintf("%v is still held by %v", addr, r))
			return
		}
		bit := p.Word(w.geo.MapOff(b)+uint64(i/64*8))>>(i%64)&1 != 0
		if bit && v.State() == proto.StateFree {
			w.fail(leakedBit, fmt.Sprintf("%v is %v and its map bit is set", addr, v))
			return
		}
		for j := range t.n {
			m := w.mem(t.node[j])
			if o := proto.V(m.Word(s.VOff())); o != v && !(w.opens(s) && j > 0 && o.Settled() == v) { // a dead session settles no backup
				w.fail("replicas differ", fmt.Sprintf("%v: %v at the primary, %v at node %d", addr, v, o, m.Node.ID))
				return
			}
			if w.excused(s.Off) || w.isHurt(s.Off, v.Version()) || v.State() == proto.StateBad && w.anyHurt(s.Off) {
				continue
			}
			if v.State() == proto.StateLive && !k.whole(m, s, seed, v) && (!w.rots(t.node[j]) || w.mended(s, seed, v) != nil) {
				w.fail("image not whole", fmt.Sprintf("%v %v at node %d", addr, v, m.Node.ID))
				return
			}
			if v.State() == proto.StateBad {
				w.fail("slab went bad", fmt.Sprintf("%v at node %d", addr, m.Node.ID))
				return
			}
		}
	}
}

// untouched reports whether 64 slabs from i on have zero map bits and zero words on all
// replicas. Most of a block has.
func (w *world) untouched(b uint32, h proto.Header, i int) bool {
	t := &w.mirror.table
	for j := range t.n {
		m := w.mem(t.node[j])
		if m.Word(w.geo.MapOff(b)+uint64(i/8)) != 0 || usedPages(m, w.geo.BlockOff(b)+uint64(i*h.Class().Bytes()), 64*h.Class().Bytes()) {
			return false
		}
	}
	return true
}

// usedPages reports whether a page that holds some of n bytes was ever written.
func usedPages(m *fabric.Memory, from uint64, n int) bool {
	const page = 4096
	for off := from &^ (page - 1); off < min(from+uint64(n), m.Bytes()); off += page {
		if m.Used(off) {
			return true
		}
	}
	return false
}

// finalRead appends a read of the object that a Ref names at the end.
func (w *world) finalRead(r int) {
	k := &w.check
	ref := k.regs[r].ref
	t := &w.mirror.table
	p := w.mem(t.node[0])
	if w.rots(t.node[0]) && t.n > 1 {
		p = w.mem(t.node[1])
	}
	e := event{client: controllerRow, kind: opRead, reg: r, call: never - 1, ret: never}
	s, seed, ok := k.place(p, uint64(ref.Addr.Off()))
	e.result = freedResult
	b, _ := w.geo.BlockOf(s.Off)
	if ok && proto.Header(p.Word(w.geo.HeaderOff(b))).Generation() == ref.Incarnation.Generation() {
		v := proto.V(p.Word(s.VOff()))
		if v.State() == proto.StateLive && k.whole(p, s, seed, v) {
			img := k.img[:proto.ImageHeaderBytes+w.d.payload]
			if h := proto.ParseImageHeader(img); h.Born == ref.Incarnation.Born() {
				e.result, e.seen, e.out = okResult, v.Version(), proto.Word(img, proto.ImageHeaderBytes)
			}
		} else if v.State() != proto.StateFree && w.anyHurt(s.Off) {
			return // lost, or damaged at the primary
		}
	}
	w.hist = append(w.hist, e)
}
