package sim

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// object is one target of the clients' work: the objects of one slab or more, one after the other.
type object struct {
	refs []int // registers, the newest last
}

// register is one object, under one Ref.
type register struct {
	ref     proto.Ref
	value   uint64 // at birth
	version uint64
	single  bool // written once
	freed   bool // a Free was acknowledged
}

// seedObjects makes the objects of the beginning of a schedule, in the first slabs of block 0
// on every replica.
func (w *world) seedObjects() {
	if w.check.regs = w.check.regs[:0]; w.tree != nil {
		w.tree.reset()
		return
	}
	h := proto.MakeHeader(proto.BlockActive, w.kind(), w.d.class, 0, 0)
	for i := range w.d.slabs {
		s := w.geo.Slab(0, i, h)
		n := w.d.version
		ref := proto.Ref{Addr: proto.MakeAddr(regionID, uint32(s.Off)), Incarnation: proto.MakeIncarnation(0, n)}
		value := w.check.value(0)
		var img [proto.ImageHeaderBytes + maxPayload]byte
		w.payload(img[proto.ImageHeaderBytes:], value, ref)
		b := proto.EncodeImage(img[:], proto.Seed(w.uid, s.Off, 0), proto.ImageHeader{Length: w.d.payload, Version: n, Born: n, Writer: proto.MakeR(1, 0)})
		for r := range w.d.replicas {
			m := w.mem(r)
			m.Store(s.ImageOff(n), b)
			m.Set(s.VOff(), uint64(proto.MakeV(proto.StateLive, n)))
		}
		w.objs = append(w.objs, object{refs: []int{len(w.check.regs)}})
		w.check.regs = append(w.check.regs, register{ref: ref, value: value, version: n})
	}
	for r := range w.d.replicas {
		m := w.mem(r)
		m.Set(w.geo.HeaderOff(0), uint64(h))
		m.Set(w.geo.MapOff(0), 1<<w.d.slabs-1)
		if w.opt.Full {
			w.fill(m)
		}
		m.Flush(0, m.Bytes())
	}
}

// A payload is a unique value, the object's own Ref, by which bytes of another object are
// found, and words computed from the value. The longer one spans several lines.
const (
	minPayload = 24
	maxPayload = 152
)

func (w *world) payload(b []byte, value uint64, ref proto.Ref) []byte {
	proto.PutWord(b, 0, value)
	proto.PutWord(b, 8, uint64(ref.Addr))
	for at := 16; at < w.d.payload; at += 8 {
		proto.PutWord(b, at, value*0x9e3779b97f4a7c15+uint64(at))
	}
	return b[:w.d.payload]
}

// Each word of a payload is computed from the first and its place, so that an image that is torn, or made of two writes, is
// seen whichever words it has.
func (w *world) payloadGood(b []byte) bool {
	if len(b) != w.d.payload {
		return false
	}
	for at := 16; at < w.d.payload; at += 8 {
		if proto.Word(b, at) != proto.Word(b, 0)*0x9e3779b97f4a7c15+uint64(at) {
			return false
		}
	}
	return true
}

// script starts the clients' programs.
func (w *world) script() {
	if w.opt.Script != nil {
		w.opt.Script.Start(w)
		return
	}
	for i := range w.d.clients {
		c := &w.clients[i]
		c.left = w.d.ops / w.d.clients
		if i < w.d.ops%w.d.clients {
			c.left++
		}
		c.start(c.work)
	}
}

func (w *world) clientsDone() bool {
	for i := range w.d.clients {
		if w.clients[i].state != procIdle {
			return false
		}
	}
	return true
}

// work is the program of a client in random schedules.
func (c *client) work() {
	if c.w.tree != nil {
		c.w.tree.work(c)
		return
	}
	for c.left > 0 {
		if c.session == 0 || c.ended {
			c.openSession()
		}
		c.left--
		if c.w.opt.Staged {
			c.lendShadows()
		}
		c.operate(c.w.ch.choose(8), c.pickObject())
		if c.w.ch.choose(4) == 1 {
			c.sleep(int64(1+c.w.ch.choose(40)) * step)
		}
		if c.w.ch.choose(2) == 1 {
			c.sleep(int64(1+c.w.ch.choose(400)) * step) // as long as a failover
		}
	}
	c.rest(true)
	if c.othersWork() {
		return
	}
	c.joinCurrent()
	if c.session != 0 && !c.ended {
		c.end("closed")
	}
}

func (c *client) pickObject() int {
	w := c.w
	n := len(w.objs)
	if w.d.shareHot && w.ch.choose(4) > 0 {
		return 0
	}
	at := w.ch.choose(n)
	for range 2 { // prefer objects that are not freed
		if o := &w.objs[at]; w.opt.Grow && w.check.regs[o.refs[len(o.refs)-1]].freed {
			at = w.ch.choose(n)
		}
	}
	return at
}

// operate does one operation. what is 0..7.
func (c *client) operate(what, obj int) {
	w := c.w
	o := &w.objs[obj]
	reg := o.refs[len(o.refs)-1]
	if len(o.refs) > 1 && w.ch.choose(6) == 1 {
		reg = o.refs[w.ch.choose(len(o.refs))] // an old Ref
	}
	if c.worsen(obj) {
		return
	}
	c.enter()
	switch {
	case w.opt.Sets && w.ch.choose(2) == 1:
		c.holdSet(reg)
	case w.opt.Grow && what >= 6:
		c.allocate()
	case w.opt.Grow && what >= 4:
		c.free(reg, true)
	case len(c.claims) > 0 && what >= 5:
		c.birth(w.ch.choose(len(c.claims)))
	case what <= 5 && w.opt.Batches && w.ch.choose(2) == 1:
		switch regs := c.batch(reg); {
		case what <= 2:
			c.readMany(regs)
		case w.d.updates:
			c.updateMany(regs)
		default:
			c.writeMany(regs)
		}
	case what <= 2:
		c.read(reg)
	case what <= 5 || !w.opt.Grow && w.ch.choose(2) == 0:
		c.update(reg)
	default:
		c.free(reg, w.ch.choose(4) != 1)
	}
	if w.opt.Grow && w.ch.choose(8) == 7 {
		c.giveBack()
	}
	c.rest(false)
	c.leave()
	c.leftNothing()
}

// giveBack releases the claims in the magazines, so that blocks become empty.
func (c *client) giveBack() {
	if c.alloc == nil || c.ended {
		return
	}
	if err := c.alloc.Trim(); err != nil && !c.w.notDone(err) {
		c.w.fail("unexpected error", fmt.Sprintf("client %d gives its claims back: %v", c.id, err))
	}
}

// leftNothing checks that a live session has no reservations except its claims.
func (c *client) leftNothing() {
	w := c.w
	p := w.mem(w.mirror.table.node[0])
	if c.ended || !w.mirror.table.open || c.view.epoch != w.mirror.table.epoch || !p.IsOpen() {
		return // the node may have lost the release with its power
	}
	claims := 0
	for _, l := range c.lanes() {
		if l.inOp || l.lane.Owes() {
			return
		}
		claims += len(l.claims)
		if l.alloc != nil {
			claims += l.alloc.Held()
		}
	}
	if held := w.check.held[c.session]; held > claims {
		w.fail("an orphan of the living", fmt.Sprintf("session %d holds %d slabs and knows of %d, and has finished its operation", c.session, held, claims))
	}
}

func (c *client) read(reg int) {
	e := c.begin(opRead, reg)
	b, info, err := c.lane.Read(c.w.check.regs[reg].ref, nil)
	c.w.done(c, e, b, info.Version, info.Version, err)
}

// The version that the callback has seen is noted: the checker compares it with the one that the Update made.
func (c *client) update(reg int) {
	w := c.w
	e := c.begin(opUpdate, reg)
	w.hist[e].in = w.check.value(c.id)
	ref := w.check.regs[reg].ref
	var buf, old [maxPayload]byte
	n, was := 0, uint64(0)
	info, err := c.lane.Update(ref, func(b []byte, info *slab.Info) ([]byte, error) {
		n, was = copy(old[:], b), info.Version
		if w.log != nil {
			w.logf("client %d: has reserved, sees value %d@%d", c.id, proto.Word(old[:], 0), was)
		}
		return w.payload(buf[:], w.hist[e].in, ref), nil
	})
	if w.check.regs[reg].single && errors.Is(err, slab.ErrImmutable) {
		err = slab.ErrBusy // written once: not done
	}
	w.done(c, e, old[:n], was, info.Version, err)
}

// With Grow the allocator frees and keeps the slab; otherwise the lane does, and keep asks for a claim, which allows the client
// to give birth in the slab.
func (c *client) free(reg int, keep bool) {
	w := c.w
	e := c.begin(opFree, reg)
	ref := w.check.regs[reg].ref
	var last []byte
	var info slab.Info
	var err error
	if w.opt.Grow {
		if err = c.allocator(); err == nil {
			last, info, err = c.alloc.Free(ref)
		}
	} else {
		var cl slab.Claim
		cl, last, info, err = c.lane.Free(ref, keep)
		if err == nil && cl.Held {
			c.claims = append(c.claims, cl)
		}
	}
	w.check.regs[reg].freed = w.check.regs[reg].freed || err == nil
	w.done(c, e, last, info.Version, info.Version+1, err)
}

// birth makes a new object in a claimed slab.
func (c *client) birth(i int) {
	w := c.w
	cl := c.claims[i]
	c.claims = append(c.claims[:i], c.claims[i+1:]...)
	ref := proto.Ref{Addr: cl.Addr(), Incarnation: proto.MakeIncarnation(cl.Generation, cl.V.Version()+1)}
	value := w.check.value(c.id)
	var buf [maxPayload]byte
	w.logf("client %d: birth of %v value %d", c.id, ref, value)
	c.doing = opBirth
	got, err := c.lane.Birth(cl, w.payload(buf[:], value, ref), 1)
	w.logf("client %d: birth of %v: %v", c.id, got, err)
	w.count(opBirth, err)
	switch {
	case err == nil:
		w.check.answered(c, uint64(got.Addr.Off()), got.Incarnation.Born())
		w.born(got, value, false)
	case !errors.Is(err, slab.ErrUnknown) && !errors.Is(err, slab.ErrStaleClaim):
		c.claims = append(c.claims, cl) // nothing was posted: the client still has the claim
	}
}

// lendShadows gives the lane an allocator, whose claims updates of STAGED slabs may use.
func (c *client) lendShadows() {
	if err := c.allocator(); err != nil {
		c.w.fail("unexpected error", err.Error())
	}
}

func (c *client) allocator() (err error) {
	if c.alloc == nil {
		c.alloc, err = alloc.New(c.lane, c)
	}
	return err
}

func (c *client) allocate() {
	w := c.w
	value := w.check.value(c.id)
	var buf [maxPayload]byte
	c.doing = opBirth
	kind := w.kind()
	if n := w.ch.choose(8); n == 7 || n&1 != 0 && w.opt.Bad { // some are lost, and restored
		kind = proto.Single
	}
	// The address is not known before, so the payload has none.
	err := c.allocator()
	var ref proto.Ref
	if err == nil {
		class := min(w.d.class+proto.Class(w.ch.choose(2)), proto.MaxClass(kind))
		want := alloc.Want{Kind: kind, Replicas: w.d.replicas, Durable: w.opt.Durable, Capacity: class.PayloadBytes(kind), Tag: 1}
		ref, err = c.alloc.Alloc(w.payload(buf[:], value, proto.Ref{}), want)
	}
	w.logf("client %d: alloc of value %d: %v %v", c.id, value, ref, err)
	w.count(opBirth, err)
	switch {
	case err == nil:
		w.check.answered(c, uint64(ref.Addr.Off()), ref.Incarnation.Born())
		w.born(ref, value, kind == proto.Single)
	case errors.Is(err, slab.ErrUnknown), w.notDone(err), errors.Is(err, alloc.ErrNoSpace):
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d alloc: %v", c.id, err))
	}
}

// born records a new object, and checks that its Ref was not used before.
func (w *world) born(ref proto.Ref, value uint64, single bool) {
	for i := range w.check.regs {
		if w.check.regs[i].ref == ref {
			w.fail("one Ref handed out twice", ref.String())
			return
		}
	}
	r := len(w.check.regs)
	w.check.regs = append(w.check.regs, register{ref: ref, value: value, version: ref.Incarnation.Born(), single: single})
	for i := range w.objs {
		o := &w.objs[i]
		if w.check.regs[o.refs[0]].ref.Addr == ref.Addr {
			o.refs = append(o.refs, r)
			return
		}
	}
	if len(w.objs) < maxSlabs {
		w.objs = append(w.objs, object{refs: []int{r}})
	}
}

// forget ends the operation of a killed client with an unknown outcome.
func (w *world) forget(c *client) {
	for i := len(w.hist) - 1; i >= 0; i-- {
		if e := &w.hist[i]; e.client == uint8(c.id) && e.result == pendingResult {
			e.result, e.ret = unknownResult, never
		}
	}
}
