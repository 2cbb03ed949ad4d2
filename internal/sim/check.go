package sim

import (
	"fmt"
	"strings"

	"github.com/quarrystore/quarry/proto"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// checker watches every verb.
type checker struct {
	w      *world
	hot    uint64 // word changed last
	regs   []register
	values uint64
	pos    []uint64
	img    []byte
	lost   bool // power has been lost in this schedule
	lostAt int64
	// held is how many slabs a session has reserved at the primary in this epoch.
	held [maxSessions]int
}

func (k *checker) reset() {
	k.hot, k.values, k.lost, k.lostAt = 0, 0, false, 0
	k.held = [maxSessions]int{}
}

// opened counts the reservations that an epoch begins with: there should be none.
func (k *checker) opened() {
	k.held = [maxSessions]int{}
	p := k.w.mem(k.w.ctl.table.node[0])
	for i := range k.w.objs {
		if s, _, ok := k.place(p, uint64(k.regs[k.w.objs[i].refs[0]].ref.Addr.Off())); ok {
			if r := proto.R(p.Word(s.ROff())); r != 0 && r.Session() < maxSessions {
				k.held[r.Session()]++
			}
		}
	}
}

// power: what was not flushed may be gone.
func (k *checker) power() {
	k.lost, k.lostAt = true, int64(k.w.steps)
	k.w.ctl.powered()
}

// value is a new value, never used before in the schedule.
func (k *checker) value(client int) uint64 {
	k.values++
	return k.values<<8 | uint64(client)
}

// place finds the slab that an offset lies in, by the header at the primary.
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
		gen-- // reservations of before are still being given back
	case !h.State().Open():
		return s, 0, false
	}
	start := w.geo.BlockOff(b)
	i := int(off-start) / h.Class().Bytes()
	s = w.geo.Slab(b, i, h)
	return s, proto.Seed(w.uid, s.Off, gen), true
}

// watched says whether a verb at m counts: m serves in the present configuration.
func (k *checker) watched(m *fabric.Memory, session uint32) (place int, p *fabric.Memory, ok bool) {
	t := &k.w.ctl.table
	if session == fabric.Agent || !t.open || m.Epoch != t.epoch {
		return 0, nil, false
	}
	place, ok = k.w.ctl.in(int(m.Node.ID - 1))
	if !ok || t.life[place] != m.Node.Incarnation {
		return 0, nil, false
	}
	return place, k.w.mem(t.node[0]), true
}

// Ran: nothing of a session runs once its fence is certified.
func (k *checker) Ran(m *fabric.Memory, session uint32) {
	if session == fabric.Agent {
		return
	}
	if sc := k.w.opt.Script; sc != nil {
		sc.ran(k.w, k.w.ctl.sess[session].client)
	}
	s := &k.w.ctl.sess[session]
	if s.state == sessionFenced || k.w.mach != nil && s.state == sessionFree { // forgotten: it was fenced before
		if _, in := k.w.ctl.in(int(m.Node.ID - 1)); in {
			k.w.fail("a verb ran after the fence", fmt.Sprintf("session %d at node %d", session, m.Node.ID))
		}
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
	s, seed, ok := k.place(p, off)
	if !ok {
		return
	}
	switch off {
	case s.ROff():
		k.reserved(m, place, session, s, proto.R(old), proto.R(new))
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
	case new != 0 && old != 0 && !w.ctl.certified(old.Session()):
		w.fail("two holders", fmt.Sprintf("%v: session %d took over from %v, whose fence is not certified", addr, session, old))
	case new == 0 && w.opt.Durable && m.Dirty(s.VOff(), 8):
		w.fail("released before V is durable", addr.String())
	}
}

// moved checks a change of V.
func (k *checker) moved(m *fabric.Memory, place int, session uint32, s proto.Slab, seed uint64, old, new proto.V) {
	w := k.w
	t := &w.ctl.table
	p := w.mem(t.node[0])
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	holder := proto.R(p.Word(s.ROff()))
	copying := t.rebuilding[place] && new.State() == proto.StateFree
	if holder.Session() != session && !copying {
		w.fail("V changed by somebody who does not hold R", fmt.Sprintf("%v at node %d: session %d changed %v to %v, holder %v", addr, m.Node.ID, session, old, new, holder))
		return
	}
	if place != 0 {
		return
	}
	if new.Version() <= old.Version() {
		w.fail("V fell at the primary", fmt.Sprintf("%v: %v to %v", addr, old, new))
		return
	}
	for i := range t.n {
		if t.rebuilding[i] {
			continue
		}
		b := w.mem(t.node[i])
		if !w.fab.Nodes()[t.node[i]].Up || w.fab.Nodes()[t.node[i]].Incarnation != t.life[i] {
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
		if w.opt.Durable && (i > 0 && b.Dirty(s.VOff(), 8) || new.State() == proto.StateLive && b.Dirty(s.ImageOff(new.Version()), k.imageBytes(b, s, new))) {
			w.fail("committed before it is durable", fmt.Sprintf("%v at node %d: %v", addr, b.Node.ID, new))
			return
		}
	}
}

// imageBytes is how long the image that v names is.
func (k *checker) imageBytes(m *fabric.Memory, s proto.Slab, v proto.V) uint64 {
	if k.w.tree == nil {
		return uint64(proto.ImageHeaderBytes + k.w.d.payload)
	}
	n := m.Word(s.ImageOff(v.Version())+8) >> proto.VersionBits
	return min(proto.ImageHeaderBytes+n, uint64(s.Class.ImageBytes(s.Kind)))
}

// whole says whether the image that v names is whole.
func (k *checker) whole(m *fabric.Memory, s proto.Slab, seed uint64, v proto.V) bool {
	n := int(k.imageBytes(m, s, v))
	if cap(k.img) < n {
		k.img = make([]byte, max(n, proto.ImageHeaderBytes+maxPayload))
	}
	k.img = k.img[:n]
	img := k.img
	m.Load(s.ImageOff(v.Version()), img)
	h, _, ok := proto.OpenImage(img, seed)
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
	s, _, ok := k.place(p, off)
	if b, _ := w.geo.BlockOf(off); !ok || proto.Header(p.Word(w.geo.HeaderOff(b))).State() == proto.BlockReclaim {
		return // being zeroed
	}
	addr := proto.MakeAddr(regionID, uint32(s.Off))
	if off < s.VOff()+8 && off+n > s.ROff() {
		w.fail("a WRITE reached R or V", addr.String())
		return
	}
	if holder := proto.R(p.Word(s.ROff())); holder.Session() != session {
		w.fail("WRITE by somebody who does not hold R", fmt.Sprintf("%v at node %d: session %d, holder %v", addr, m.Node.ID, session, holder))
		return
	}
	if w.ctl.table.rebuilding[place] || s.Kind == proto.Single {
		return
	}
	v := proto.V(p.Word(s.VOff()))
	if at := s.ImageOff(v.Version()); v.State() == proto.StateLive && off+n > at && off < at+uint64(s.Class.ImageBytes(s.Kind)) && !w.rots(int(m.Node.ID-1)) {
		w.fail("the active image was written", fmt.Sprintf("%v at node %d: session %d, %v", addr, m.Node.ID, session, v))
	}
}

// settled says whether the healed cluster has come to rest.
func (w *world) settled() bool {
	k := &w.ctl
	if k.phase != phaseOpen || !w.clientsDone() || w.mach == nil && w.halfWay() {
		return false
	}
	if k.table.n < w.d.replicas {
		return false
	}
	for i := range k.table.n {
		if k.table.rebuilding[i] || w.fab.Nodes()[k.table.node[i]].Incarnation != k.table.life[i] {
			return false
		}
	}
	for id := range k.sess {
		s := &k.sess[id]
		switch s.state {
		case sessionFencing, sessionFenced:
			return false
		case sessionLive:
			if c := &w.clients[s.client]; s.client < maxClients || c.state != procIdle || c.session != uint32(id) || c.ended {
				return false
			}
		}
	}
	return true
}

func (w *world) whoWaits() string {
	var b strings.Builder
	for i := range w.clients {
		if c := &w.clients[i]; c.state != procIdle {
			fmt.Fprintf(&b, "client %d state %d session %d waits %d; ", i, c.state, c.session, c.waits)
		}
	}
	fmt.Fprintf(&b, "phase %d, %s", w.ctl.phase, tableString(&w.ctl.table))
	for id := range w.ctl.sess {
		if s := &w.ctl.sess[id]; s.state != sessionFree {
			fmt.Fprintf(&b, "; session %d state %d client %d acked %d", id, s.state, s.client, s.acked)
		}
	}
	return b.String()
}

// finalChecks looks at the healed, scrubbed memory, and at the histories.
func (w *world) finalChecks() {
	k, t := &w.check, &w.ctl.table
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

// leakedBit is a slab that is nobody's and still marked as taken.
const leakedBit = "leak of a free slab"

func (w *world) checkBlock(b uint32, h proto.Header) {
	k, t := &w.check, &w.ctl.table
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
			if o := proto.V(m.Word(s.VOff())); o != v {
				w.fail("replicas differ", fmt.Sprintf("%v: %v at the primary, %v at node %d", addr, v, o, m.Node.ID))
				return
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

// untouched says whether 64 slabs from i on have neither bits nor anything in
// their words, on all replicas: most of a block.
func (w *world) untouched(b uint32, h proto.Header, i int) bool {
	t := &w.ctl.table
	from := w.geo.BlockOff(b) + uint64(i*h.Class().Bytes())
	to := min(from+uint64(64*h.Class().Bytes()), w.geo.BlockOff(b)+proto.BlockBytes)
	for j := range t.n {
		m := w.mem(t.node[j])
		if m.Word(w.geo.MapOff(b)+uint64(i/8)) != 0 {
			return false
		}
		for off := from; off < to; off += 4096 {
			if m.Used(off) {
				return false
			}
		}
	}
	return true
}

// finalRead appends a read of what a Ref names in the end.
func (w *world) finalRead(r int) {
	k := &w.check
	ref := k.regs[r].ref
	t := &w.ctl.table
	p := w.mem(t.node[0])
	if w.rots(t.node[0]) && t.n > 1 {
		p = w.mem(t.node[1])
	}
	e := event{client: controllerRow, kind: opRead, reg: r, call: never - 1, ret: never}
	s, seed, ok := k.place(p, uint64(ref.Addr.Off()))
	e.result = freedResult
	b, _ := w.geo.BlockOf(s.Off)
	if ok && proto.Header(p.Word(w.geo.HeaderOff(b))).Generation() == ref.Life.Generation() {
		v := proto.V(p.Word(s.VOff()))
		if v.State() == proto.StateLive && k.whole(p, s, seed, v) {
			img := k.img[:proto.ImageHeaderBytes+w.d.payload]
			if h := proto.ParseImageHeader(img); h.Born == ref.Life.Born() {
				e.result, e.seen, e.out = okResult, v.Version(), proto.Word(img, proto.ImageHeaderBytes)
			}
		}
	}
	w.hist = append(w.hist, e)
}
