//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

const (
	// connectTimeout bounds how long a client waits for the queue pairs to be connected
	// once it is welcome: the kernel would go on for minutes.
	connectTimeout = 20 * time.Second
	// joinTimeout bounds how long a node keeps a queue pair for a client that it has welcomed.
	joinTimeout = 30 * time.Second
)

// at is where the device listens or calls from.
func (d *device) at(addr [16]byte, port uint16) C.q_addr {
	a := C.q_addr{port: C.uint16_t(port), scope: C.uint32_t(d.scope), pkey: C.uint16_t(d.config.PKey)}
	for i, b := range addr {
		a.gid[i] = C.uint8_t(b)
	}
	switch {
	case d.caps.IWARP:
		a.iwarp = 1
	case !d.caps.RoCE:
		a.infiniband = 1
	}
	return a
}

// link is how queue pairs of the device use the network.
func (d *device) link() C.q_link {
	l := &d.config.Link
	return C.q_link{
		traffic_class: C.uint8_t(l.TrafficClass), service_level: C.uint8_t(l.ServiceLevel),
		timeout: C.uint8_t(l.timeout()), retries: C.uint8_t(l.Retries),
	}
}

// join connects a lane's queue pair to a node. errHeard: the node has something to say, or hung up.
func (d *device) join(l *C.q_lane, peer endpoint, private []byte, limit time.Duration) error {
	name := d.caps.Device
	own, to := d.caps.GID.As16(), netip.AddrFrom16(peer.addr).Unmap()
	if to.Is4() != d.caps.GID.Is4() {
		return fmt.Errorf("%s has the address %v, the node %v: both need addresses of one kind", name, d.caps.GID, to)
	}
	from, at := d.at(own, 0), d.at(peer.addr, peer.port)
	var why C.q_failure
	link := d.link()
	r := C.q_lane_connect(l, &from, &at, C.uint8_t(d.caps.Port), (*C.uint8_t)(&private[0]), C.uint8_t(len(private)),
		C.uint8_t(d.caps.MaxReads), &link, C.int64_t(limit), &why)
	switch r {
	case C.Q_DONE:
		return nil
	case C.Q_SOCKET:
		return errHeard
	}
	return fmt.Errorf("%s cannot connect to %v: %w", name, netip.AddrPortFrom(to, peer.port), failure(r, &why))
}

var errHeard = errors.New("the node hung up")

// failure says what a step of connecting has failed of.
func failure(r C.int, why *C.q_failure) error {
	var err error
	switch {
	case r == C.Q_TIMEOUT:
		err = errors.New("no answer in time")
	case r == C.Q_SYSTEM:
		err = unix.Errno(why.error)
	case why.status < 0:
		err = unix.Errno(-why.status)
	default:
		err = fmt.Errorf("event %d, status %d", why.event, why.status)
	}
	switch why.step {
	case C.Q_STEP_OPEN:
		return fmt.Errorf("connection manager: %w: give this user access to /dev/infiniband/rdma_cm", err)
	case C.Q_STEP_ADDRESS:
		return fmt.Errorf("no way to the address: %w: check the route from the RDMA port, or choose another one with the device", err)
	case C.Q_STEP_DEVICE:
		return errors.New("the way leads over another device or port: choose that one")
	case C.Q_STEP_ROUTE:
		return fmt.Errorf("no path: %w: check the subnet manager", err)
	case C.Q_STEP_QUEUE_PAIR:
		return fmt.Errorf("starting the queue pair: %w", err)
	}
	if why.event == C.RDMA_CM_EVENT_REJECTED {
		switch why.status {
		case 8: // IB_CM_REJ_INVALID_SERVICE_ID
			return errors.New("no process listens there: the node has ended")
		case 10: // IB_CM_REJ_STALE_CONN
			return errors.New("the node's adapter knows the queue pair as connected: try again")
		case 28: // IB_CM_REJ_CONSUMER_DEFINED
			return errors.New("the node refuses the queue pair")
		}
	}
	if why.event == C.RDMA_CM_EVENT_UNREACHABLE {
		return fmt.Errorf("no answer (status %d): check that UDP port 4791 is open between the RDMA ports", why.status)
	}
	return err
}

// listen takes requests to connect.
func (s *Server) listen() error {
	d := s.device
	at := d.at(d.caps.GID.As16(), 0)
	if e := C.q_listen(d.ctx, C.uint8_t(d.caps.Port), &at, &s.events, &s.listener); e != 0 {
		return fmt.Errorf("%w: %s port %d cannot listen on %v: %w: give that address to its network interface, or choose another one with the device",
			ErrDevice, d.caps.Device, d.caps.Port, d.caps.GID, unix.Errno(e))
	}
	s.port = uint16(at.port)
	return nil
}

// deafen ends the acceptance of queue pairs.
func (s *Server) deafen() error {
	return problem("closing the listener", C.q_listen_close(s.events, s.listener))
}

// meet passes on what the connection manager has to say.
func (s *Server) meet() {
	var ev C.q_event
	for {
		n := C.q_event_next(s.events, C.int(s.wake), &ev)
		if n == 0 {
			return
		}
		if n < 0 {
			s.fail(fmt.Errorf("connection manager failed, no client can connect: %w", unix.Errno(-n)))
			return
		}
		switch ev.kind {
		case C.Q_EVENT_REQUEST:
			s.join(&ev)
		case C.Q_EVENT_GONE, C.Q_EVENT_REMOVED:
			s.mu.Lock()
			l := s.lanes[uint64(ev.lane)]
			s.mu.Unlock()
			if l != nil {
				l.nc.Close() // its goroutine does the rest
			} else if ev.kind == C.Q_EVENT_REMOVED && ev.lane == 0 {
				s.fail(errors.New("the device was removed"))
			}
		}
	}
}

// join lets a client in that names a lane which waits for it.
func (s *Server) join(ev *C.q_event) {
	var private [C.Q_PRIVATE]byte
	for i := range private {
		private[i] = byte(ev.data[i])
	}
	c, err := decodeClaim(private[:ev.len])
	var l *lane
	if err == nil {
		s.mu.Lock()
		if l = s.joins[c.nonce]; l != nil {
			delete(s.joins, c.nonce) // it is good for one
		}
		s.mu.Unlock()
		if l == nil || l.number != c.lane {
			err = errors.New("no lane has this nonce")
		}
	}
	if err == nil {
		if err = l.join(ev.id, int(ev.reads)); err == nil {
			return
		}
	}
	s.strays.Add(1)
	s.log.Warn("verbs fabric: request to connect refused", "error", err)
	if e := C.q_reject(ev.id); e != 0 {
		s.log.Error("verbs fabric: refusing a request to connect", "error", unix.Errno(e))
	}
	if l != nil {
		l.nc.Close()
	}
}

// join connects the queue pair. An error leaves the id to the caller.
func (l *lane) join(id *C.struct_rdma_cm_id, reads int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped != nil || l.qp == nil {
		return rdma.ErrBroken
	}
	reads = max(1, min(reads, l.server.device.caps.MaxReads))
	link := l.server.device.link()
	if err := problem("connecting a queue pair", C.q_accept(id, l.qp, l.access(), C.uint8_t(reads), &link, C.uint64_t(l.id), l.server.device.iwarp())); err != nil {
		return err
	}
	l.cm = id
	l.nc.SetReadDeadline(time.Time{}) // greet gave it time until now
	return nil
}
