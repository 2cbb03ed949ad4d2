package sim

import (
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

// object is a place that clients work on, with the Refs that named its objects.
type object struct {
	refs []int // registers, the newest last
}

// register is the life of one object under one Ref.
type register struct {
	ref     proto.Ref
	value   uint64 // at birth
	version uint64
}

// seedObjects makes the objects that a schedule begins with: the first slabs of
// block 0, on every replica.
func (w *world) seedObjects() {
	h := proto.MakeHeader(proto.BlockActive, proto.Pair, w.d.class, 0, 0)
	w.check.regs = w.check.regs[:0]
	for i := range w.d.slabs {
		s := w.geo.Slab(0, i, h)
		ref := proto.Ref{Addr: proto.MakeAddr(regionID, uint32(s.Off)), Life: proto.MakeLife(0, 1)}
		value := w.check.value(0)
		var img [128]byte
		payload(img[proto.ImageHeaderBytes:], value, ref)
		b := proto.SealImage(img[:], proto.Seed(w.uid, s.Off, 0), proto.ImageHeader{Length: payloadBytes, Version: 1, Born: 1, Writer: proto.MakeR(1, 0)})
		for r := range w.d.replicas {
			m := w.mem(r)
			m.Store(s.ImageOff(1), b)
			m.Set(s.VOff(), uint64(proto.MakeV(proto.StateLive, 1)))
		}
		w.objs = append(w.objs, object{refs: []int{len(w.check.regs)}})
		w.check.regs = append(w.check.regs, register{ref, value, 1})
	}
	for r := range w.d.replicas {
		m := w.mem(r)
		m.Set(w.geo.HeaderOff(0), uint64(h))
		m.Set(w.geo.MapOff(0), 1<<w.d.slabs-1)
		m.Flush(0, m.Bytes())
	}
}

// payloadBytes: a unique value and the object's own Ref, so that bytes of another
// object show.
const payloadBytes = 24

func payload(b []byte, value uint64, ref proto.Ref) []byte {
	proto.PutWord(b, 0, value)
	proto.PutWord(b, 8, uint64(ref.Addr))
	proto.PutWord(b, 16, value*0x9e3779b97f4a7c15)
	return b[:payloadBytes]
}

// script gives the clients their work.
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

// work is the life of a random client.
func (c *client) work() {
	for c.left > 0 {
		if c.session == 0 || c.ended {
			c.openSession()
		}
		c.left--
		c.operate(c.w.ch.choose(8), c.pickObject())
		if c.w.ch.choose(4) == 1 {
			c.sleep(int64(1+c.w.ch.choose(40)) * step)
		}
		if c.w.mach != nil && c.w.ch.choose(2) == 1 {
			c.sleep(int64(1+c.w.ch.choose(400)) * step) // failovers take as long as that
		}
	}
	if c.session != 0 && !c.ended {
		c.end("closed")
	}
}

func (c *client) pickObject() int {
	n := len(c.w.objs)
	if c.w.d.shareHot && c.w.ch.choose(4) > 0 {
		return 0
	}
	return c.w.ch.choose(n)
}

// operate does one operation. what is 0..7.
func (c *client) operate(what, obj int) {
	w := c.w
	o := &w.objs[obj]
	reg := o.refs[len(o.refs)-1]
	if len(o.refs) > 1 && w.ch.choose(6) == 1 {
		reg = o.refs[w.ch.choose(len(o.refs))] // an old Ref
	}
	c.enter()
	switch {
	case w.opt.Grow && what >= 6:
		c.allocate()
	case len(c.claims) > 0 && what >= 5:
		c.birth(w.ch.choose(len(c.claims)))
	case what <= 2:
		c.read(reg)
	case what <= 5 || !w.opt.Grow && w.ch.choose(2) == 0:
		c.update(reg)
	default:
		c.free(reg, w.ch.choose(4) != 1)
	}
	c.leave()
	if !w.opt.Grow {
		c.leftNothing(w.check.regs[reg].ref)
	}
}

// leftNothing: a session that lives on holds nothing but its claims.
func (c *client) leftNothing(ref proto.Ref) {
	w := c.w
	if c.ended || !w.ctl.table.open || c.view.epoch != w.ctl.table.epoch {
		return
	}
	s, _, ok := w.check.place(w.mem(w.ctl.table.node[0]), uint64(ref.Addr.Off()))
	if !ok || !w.mem(w.ctl.table.node[0]).IsOpen() {
		return // a node that is down may have lost the release with its power
	}
	r := proto.R(w.mem(w.ctl.table.node[0]).Word(s.ROff()))
	for i := range c.claims {
		if c.claims[i].R == r {
			return
		}
	}
	if r.Session() == c.session {
		w.fail("an orphan of the living", fmt.Sprintf("%v is held by %v, which has finished its operation", ref, r))
	}
}

func (c *client) read(reg int) {
	e := c.begin(opRead, reg)
	b, info, err := c.lane.Read(c.w.check.regs[reg].ref, nil)
	c.w.done(c, e, b, info.Version, info.Version, err)
}

func (c *client) update(reg int) {
	w := c.w
	e := c.begin(opUpdate, reg)
	w.hist[e].in = w.check.value(c.id)
	ref := w.check.regs[reg].ref
	var buf [payloadBytes]byte
	var old [payloadBytes]byte
	n, was := 0, uint64(0)
	info, err := c.lane.Update(ref, func(b []byte, info *slab.Info) ([]byte, error) {
		n, was = copy(old[:], b), info.Version
		if w.log != nil {
			w.logf("client %d: has reserved, sees value %d@%d", c.id, proto.Word(old[:], 0), was)
		}
		return payload(buf[:], w.hist[e].in, ref), nil
	})
	w.done(c, e, old[:n], was, info.Version, err)
}

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
	w.done(c, e, last, info.Version, info.Version+1, err)
}

// birth puts a new object into a claimed slab.
func (c *client) birth(i int) {
	w := c.w
	cl := c.claims[i]
	c.claims = append(c.claims[:i], c.claims[i+1:]...)
	ref := proto.Ref{Addr: cl.Addr(), Life: proto.MakeLife(cl.Generation, cl.V.Version()+1)}
	value := w.check.value(c.id)
	var buf [payloadBytes]byte
	w.logf("client %d: birth of %v value %d", c.id, ref, value)
	got, err := c.lane.Birth(cl, payload(buf[:], value, ref), 1)
	w.logf("client %d: birth of %v: %v", c.id, got, err)
	w.count(opBirth, err)
	if err == nil {
		w.born(got, value)
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
	var buf [payloadBytes]byte
	// The address is not known before: the payload says none.
	err := c.allocator()
	var ref proto.Ref
	if err == nil {
		want := alloc.Want{Kind: proto.Pair, Replicas: w.d.replicas, Capacity: (proto.Class(1 + w.ch.choose(2))).PayloadBytes(proto.Pair), Tag: 1}
		ref, err = c.alloc.Alloc(payload(buf[:], value, proto.Ref{}), want)
	}
	w.logf("client %d: alloc of value %d: %v %v", c.id, value, ref, err)
	w.count(opBirth, err)
	if err == nil {
		w.born(ref, value)
	}
}

// born notes a new object. No Ref is ever given out twice.
func (w *world) born(ref proto.Ref, value uint64) {
	for i := range w.check.regs {
		if w.check.regs[i].ref == ref {
			w.fail("one Ref handed out twice", ref.String())
			return
		}
	}
	r := len(w.check.regs)
	w.check.regs = append(w.check.regs, register{ref, value, ref.Life.Born()})
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

// forget writes off what a killed client had in hand: it may have been done.
func (w *world) forget(c *client) {
	for i := len(w.hist) - 1; i >= 0; i-- {
		if e := &w.hist[i]; e.client == uint8(c.id) && e.result == pendingResult {
			e.result, e.ret = unknownResult, never
		}
	}
}
