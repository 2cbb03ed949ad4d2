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

// skipping is what a part that is being written down owes to FLUSHes that are left to a later one.
type skipping struct {
	at    int  // the last of them in verbs, if no later one has come; -1: none
	fence bool // one of them had a fence, which the next verb has to have
}

// method is how a persistent FLUSH is carried out: as the node has told, but by message where the node says native and the
// library that this program has met cannot.
func (c *conn) method(w *window, v *rdma.Verb) rdma.FlushMethod {
	if w.Flush == rdma.Native && (c.lane.flushes == nil || v.Bytes > math.MaxUint32) {
		return rdma.Message
	}
	return w.Flush
}

// asks says whether the node has to be asked for what the verb does.
func (c *conn) asks(w *window, v *rdma.Verb) bool {
	return v.Op == rdma.Flush && v.Kind == rdma.Persistent && c.method(w, v) == rdma.Message
}

// describeFlush writes a FLUSH down, the verb of a chain at a place. Where nothing else is known of d it is a READ: one
// is ordered after earlier WRITEs of the queue pair, and so pushes them out.
func (c *conn) describeFlush(d *C.q_verb, n int, w *window, verbs []rdma.Verb, at int) {
	v := &verbs[at]
	native := C.uint8_t(0)
	if v.Kind == rdma.Visible {
		if w.flushes && c.lane.flushes != nil && v.Bytes <= math.MaxUint32 {
			native = C.Q_VISIBLE
		}
	} else {
		switch c.method(w, v) {
		case rdma.Native:
			native = C.Q_VISIBLE | C.Q_PERSISTENT
		case rdma.ReadAfterWrite:
			if rdma.LeftToLater(verbs, at) {
				c.skipping = skipping{at: n, fence: d.fence != 0}
				d.op = C.Q_SKIP
				return
			}
			c.skipping.at = -1
			c.dialer.pushed.Add(1)
		default:
			c.dialer.asked.Add(1)
		}
	}
	if native != 0 {
		d.op, d.len, d.flush = C.Q_FLUSH, C.uint32_t(v.Bytes), native
		c.dialer.flushed.Add(1)
		return
	}
	d.len = C.uint32_t(min(8, v.Bytes))
}

// pushSkipped ends a part whose last FLUSH was left to one that has been refused.
func (c *conn) pushSkipped() {
	if c.skipping.at >= 0 {
		c.verbs[c.skipping.at].op = C.Q_READ
		c.dialer.pushed.Add(1)
	}
}

// method is how clients have memory made durable.
func (s *Server) method(m *host.Memory) rdma.FlushMethod {
	switch chosen := s.device.config.Flush; {
	case !m.Persistent():
		return rdma.NoFlush
	case chosen != rdma.NoFlush:
		return chosen
	}
	return rdma.Message
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
	refused, err := s.device.registers(mem, regionAccess|C.Q_ACCESS_FLUSH)
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
	mr, refused := register(pd, mem, 0, access)
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
	refused, err := d.registers(mem, regionAccess|C.Q_ACCESS_FLUSH|C.Q_ACCESS_PERSISTENT)
	if refused != nil {
		refused = fmt.Errorf("%s does not register this memory for a persistent FLUSH: %w", name, refused)
	}
	return errors.Join(refused, err)
}
