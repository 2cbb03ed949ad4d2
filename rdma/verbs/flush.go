//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

// skipping describes FLUSHes that are not posted because a later one does their work.
type skipping struct {
	at    int       // the last of them in verbs, if no later one has come; -1: none
	op    C.uint8_t // what it is posted as if none comes
	fence bool      // one of them had a fence, which the next verb has to have
}

// method is how a persistent FLUSH is carried out: as the node has told; by message where the
// node says native and this program's library cannot.
func (c *conn) method(w *window, v *rdma.Verb) rdma.FlushMethod {
	if w.Flush == rdma.Native && (c.lane.flushes == nil || v.Bytes > math.MaxUint32) {
		return rdma.Message
	}
	return w.Flush
}

// asks says whether the node has to be asked for what the verb does.
func (c *conn) asks(w *window, v *rdma.Verb) bool {
	return persistent(v) && c.method(w, v) == rdma.Message
}

// behind says whether a verb must not be posted before the node's answer: it has a fence, is a READ, or needs a request of its own.
func (c *conn) behind(w *window, v *rdma.Verb) bool {
	return v.Fence || v.Op == rdma.Read || v.Op == rdma.Verify || c.asks(w, v)
}

// later says whether the next persistent FLUSH of a chain does the work of one, too: it has to be carried out in the same way.
func (c *conn) later(w *window, verbs []rdma.Verb, at int) bool {
	return rdma.LeftToLater(verbs, at) && c.method(w, &verbs[nextPersistent(verbs, at)]) == c.method(w, &verbs[at])
}

// describeFlush writes a FLUSH down. Where nothing else is known of d it is a READ: one is ordered after earlier WRITEs of the
// queue pair, and so pushes them out. full: another chain's request to the node is under way.
func (c *conn) describeFlush(d *C.q_verb, n int, w *window, p *posted) (full bool, err error) {
	v, fenced := &p.chain.Verbs[p.to], d.fence != 0
	d.len = C.uint32_t(min(8, v.Bytes))
	if v.Kind == rdma.Visible {
		if w.flushes && c.lane.flushes != nil && v.Bytes <= math.MaxUint32 {
			c.flushBy(d, v, C.Q_VISIBLE)
		}
		return false, nil
	}
	later := c.later(w, p.chain.Verbs, p.to)
	switch c.method(w, v) {
	case rdma.Native:
		c.flushBy(d, v, C.Q_VISIBLE|C.Q_PERSISTENT)
		return false, nil
	case rdma.ReadAfterWrite:
		if !later {
			c.dialer.pushed.Add(1)
		}
	default:
		if c.asking {
			return true, nil
		}
		if later, err = c.askFor(d, w, v, later); err != nil {
			return false, err
		}
		p.asks = !later
	}
	if c.skipping = (skipping{at: -1}); later {
		c.skipping = skipping{at: n, op: d.op, fence: fenced}
		d.op, p.skips = C.Q_SKIP, true
	}
	return false, nil
}

// flushBy makes a work request of a FLUSH that the adapter carries out itself.
func (c *conn) flushBy(d *C.q_verb, v *rdma.Verb, what C.uint8_t) {
	d.op, d.len, d.flush = C.Q_FLUSH, C.uint32_t(v.Bytes), what
	c.dialer.flushed.Add(1)
}

// askFor puts a range into what the node is asked for, and d becomes the SEND of it. It is the last range if no
// other fits.
func (c *conn) askFor(d *C.q_verb, w *window, v *rdma.Verb, more bool) (later bool, err error) {
	what := taskFlush
	if v.Op == rdma.Verify {
		what = taskHash
	}
	if c.notes == nil {
		if c.notes, c.notesMR, err = c.pinned(notesBytes); err != nil {
			return false, fmt.Errorf("%w: no memory to ask nodes: %w", rdma.ErrLimit, err)
		}
	}
	a := asked{c.notes}
	if c.skipping.at < 0 {
		c.askTag++
		a.start(c.askTag, what, w.Region, w.Epoch)
	}
	a.add(v.Off, v.Bytes, v.New)
	if what == taskFlush {
		c.dialer.asked.Add(1)
	}
	d.op, d.fence = C.Q_SEND, 1
	d.local, d.lkey, d.len = C.uint64_t(addressOf(c.notes)), C.uint32_t(c.notesMR.lkey), C.uint32_t(a.len())
	return more && a.room(), nil
}

// describeVerify writes a VERIFY down: the node's processors hash the range, in the same request as those of the VERIFYs next to it.
// Nothing else is posted before the answer, so that no verb overtakes a VERIFY that is refused. full: another chain's request to the
// node is under way.
func (c *conn) describeVerify(d *C.q_verb, n int, w *window, p *posted) (full bool, err error) {
	if c.asking {
		return true, nil
	}
	v := &p.chain.Verbs[p.to]
	more := p.to+1 < len(p.chain.Verbs) && p.chain.Verbs[p.to+1].Op == rdma.Verify
	if more, err = c.askFor(d, w, v, more); err != nil {
		return false, err
	}
	p.verifies, p.asks = true, !more
	if c.skipping = (skipping{at: -1}); more {
		c.skipping = skipping{at: n, op: d.op}
		d.op, p.skips = C.Q_SKIP, true
	}
	return false, nil
}

// pushSkipped ends a part whose last FLUSH or VERIFY was left to one that has been refused.
func (c *conn) pushSkipped(p *posted) {
	if at := c.skipping.at; at >= 0 {
		c.verbs[at].op = c.skipping.op
		if c.skipping.op == C.Q_SEND {
			p.asks = true
		} else {
			c.dialer.pushed.Add(1)
		}
	}
}

// listen posts the receive for the node's answer of at most so many bytes, before the part that asks.
func (c *conn) listen(p *posted, bytes int) bool {
	_, answer := halves(c.notes)
	clear(answer[:bytes]) // an answer that is too short has no results of an earlier one
	if e := C.q_receive(c.lane.qp, C.Q_MESSAGE, address(answer), C.uint32_t(bytes), c.notesMR.lkey); e != 0 {
		c.unposted(p, 0, unix.Errno(e))
		return false
	}
	c.asking, c.acting = true, p.acts
	c.told++
	return true
}

// answered takes the node's answer to a part, whose other verbs are done. It says whether the chain goes on.
func (c *conn) answered(p *posted) bool {
	c.asking, c.acting = false, false
	if p.acts {
		return c.acted(p)
	}
	_, b := halves(c.notes)
	f, err := decodeAnswered(b, asked{c.notes})
	if err != nil {
		c.fail(err)
		p.chain.Done, p.chain.Err = p.from, c.dead
		return false
	}
	if p.verifies {
		return c.verified(p, &f)
	}
	if f.err == nil {
		return true
	}
	w := c.window(&p.chain.To.Window)
	at, overtaken := unflushed(p.chain.Verbs[p.from:p.to], f.done, func(v *rdma.Verb) bool {
		return persistent(v) && (w == nil || c.asks(w, v))
	})
	p.chain.Done = p.from + at
	if p.chain.Err = f.err; overtaken {
		c.fail(errOvertaken)
		p.chain.Err = c.dead
	}
	return false
}

// verified takes the hashes of a part's VERIFYs, which are its last verbs.
func (c *conn) verified(p *posted, f *answered) bool {
	verbs := p.chain.Verbs[:p.to]
	_, b := halves(c.notes)
	first := len(verbs) - asked{c.notes}.ranges()
	for i := range f.done {
		verbs[first+i].Old = hashIn(b, i)
	}
	if f.err == nil {
		return true
	}
	p.chain.Done, p.chain.Err = first+f.done, f.err
	return false
}

// method is how clients have memory made durable.
func (s *Server) method(m *host.Memory) rdma.FlushMethod {
	if !m.Persistent() {
		return rdma.NoFlush
	}
	return s.device.config.Flush
}

// chooseFlush sees whether memory can be registered so that clients may FLUSH it. Windows
// cannot have that right.
func (s *Server) chooseFlush() error {
	if s.windows {
		if s.device.config.Flush == rdma.Native {
			return fmt.Errorf("%w: %w", ErrDevice, errWindowsFlush)
		}
		return nil
	}
	if !s.device.caps.Flush {
		return nil
	}
	mem, err := unix.Mmap(-1, 0, unix.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil
	}
	refused, err := s.device.registers(mem, s.device.regionAccess()|C.Q_ACCESS_FLUSH)
	s.flushes = refused == nil
	return errors.Join(err, unix.Munmap(mem))
}

var errWindowsFlush = errors.New("memory windows have no right to a native FLUSH, and may be in use here: --rdma-windows off")

// registers says whether the device registers memory with some rights.
func (d *device) registers(mem []byte, access C.int) (refused, err error) {
	pd := C.q_pd(d.ctx)
	if pd == nil {
		return errors.New("no protection domain"), nil
	}
	mr, refused := register(pd, mem, d.base(mem), access)
	if refused == nil {
		err = problem("deregistering the probe", C.q_deregister(mr))
	}
	return refused, errors.Join(err, problem("freeing a protection domain", C.q_free_pd(pd)))
}

// NotNative is why the device does not make memory durable by a FLUSH of its own; nil: it does.
func NotNative(c Config, mem []byte) error {
	d, err := openDevice(c, netip.Addr{})
	if err != nil {
		return err
	}
	return errors.Join(d.notNative(mem), d.close())
}

// notNative says why the adapter cannot make this memory durable by a FLUSH of its own; nil: it
// can.
func (d *device) notNative(mem []byte) error {
	name := d.caps.Device
	if !d.caps.Persistent {
		return fmt.Errorf("%s has no persistent FLUSH (device capabilities)", name)
	}
	if w := d.config.Windows; w == WindowsOn || w == WindowsAuto && d.caps.Windows2B {
		return errWindowsFlush
	}
	pd := C.q_pd(d.ctx)
	if pd == nil {
		return fmt.Errorf("%s has no protection domain left", name)
	}
	var l *C.q_lane
	err := problem("a queue pair of "+name, C.q_lane_open(d.ctx, pd, &C.q_lane_want{depth: leastDepth, flush: 1}, &l))
	if err == nil {
		if l.flushes == nil {
			err = errors.New("libibverbs has no FLUSH: it needs rdma-core 45")
		}
		err = errors.Join(err, closeLane(l))
	}
	if err = errors.Join(err, problem("freeing a protection domain", C.q_free_pd(pd))); err != nil {
		return err
	}
	refused, err := d.registers(mem, d.regionAccess()|C.Q_ACCESS_FLUSH|C.Q_ACCESS_PERSISTENT)
	if refused != nil {
		refused = fmt.Errorf("%s does not register this memory for a persistent FLUSH: %w", name, refused)
	}
	return errors.Join(refused, err)
}
