//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

const (
	// helloTimeout bounds how long a connection may take to say who it is.
	helloTimeout = 5 * time.Second
	// maxStrangers bounds the connections that have not said it yet.
	maxStrangers = 256
	// maxLanes bounds the lanes of a node. The queue of flushes has two entries for each: one
	// for a bind.
	maxLanes = 8192
	// bindID marks the completions of binds among those of receives.
	bindID = 1 << 63
	// answerTimeout bounds how long a client may take to accept an answer.
	answerTimeout = 5 * time.Second
)

// Server lets the adapter execute verbs on a node's regions, and takes that back.
// It is what host.Access is to the other providers.
type Server struct {
	cluster     [16]byte
	key         [32]byte
	node        uint32
	incarnation uint64
	limits      host.Limits
	log         *slog.Logger
	device      *device
	ctx         context.Context
	cancel      context.CancelFunc

	channel  *C.struct_ibv_comp_channel
	drains   *C.struct_ibv_cq
	events   *C.struct_rdma_event_channel
	listener *C.struct_rdma_cm_id
	port     uint16        // of the listener
	wake     int           // eventfd that ends drain and meet
	patience time.Duration // joinTimeout
	windows  bool          // of type 2, for each lane and region
	flushes  bool          // regions take native FLUSHes

	served  sync.WaitGroup // sockets
	drained sync.WaitGroup // drain and meet
	access  atomic.Uint64  // queue pairs that died of what their client sent
	strays  atomic.Uint64  // requests to connect that were refused

	registrations, registeredNs, expelled atomic.Uint64

	mu        sync.Mutex
	regions   map[uint32]*region
	domains   map[uint32]*domain // by tenant
	sessions  map[uint64]*session
	lanes     map[uint64]*lane   // by id
	joins     map[[16]byte]*lane // whose client has yet to connect, by nonce
	nextID    uint64
	ended     host.Ended
	offences  map[uint64]uint64 // by serial; see offend
	counting  time.Time         // since then
	strangers []net.Conn        // oldest first
	closed    bool
}

// errLate: the client has connected again since.
var errLate = fmt.Errorf("%w: a later connection has this lane", rdma.ErrBroken)

type session struct {
	ticket rdma.Ticket
	since  time.Time
	lanes  map[uint32]*lane
}

// domain keeps a tenant apart from the others.
type domain struct {
	pd    *C.struct_ibv_pd
	lanes int // guarded by Server.mu
}

// NewServer opens the device. Tickets are those marked with the cluster's key.
func NewServer(cluster [16]byte, key [32]byte, node uint32, incarnation uint64, limits host.Limits, c Config, log *slog.Logger) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if limits.Sessions == 0 {
		limits.Sessions = 4096
	}
	if limits.LanesPerSession == 0 {
		limits.LanesPerSession = 256
	}
	if limits.Offences == 0 {
		limits.Offences = 1000
	}
	dev, err := openDevice(c, netip.Addr{})
	if err != nil {
		return nil, err
	}
	s := &Server{
		cluster: cluster, key: key, node: node, incarnation: incarnation, limits: limits, log: log, device: dev, patience: joinTimeout,
		regions: make(map[uint32]*region), domains: make(map[uint32]*domain),
		sessions: make(map[uint64]*session), lanes: make(map[uint64]*lane), joins: make(map[[16]byte]*lane), offences: make(map[uint64]uint64),
	}
	if e := C.q_drains_open(dev.ctx, 2*maxLanes, &s.channel, &s.drains); e != 0 {
		dev.close()
		return nil, problem("completion queue on "+dev.caps.Device, e)
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		C.q_drains_close(s.channel, s.drains)
		dev.close()
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if err := s.listen(); err != nil {
		unix.Close(s.wake)
		C.q_drains_close(s.channel, s.drains)
		dev.close()
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.drained.Go(s.drain)
	s.drained.Go(s.meet)
	s.chooseWindows(c.windows)
	if err := s.chooseFlush(); err != nil {
		return nil, errors.Join(err, s.Close(context.Background()))
	}
	return s, nil
}

// Caps describes the device in use.
func (s *Server) Caps() Caps { return s.device.caps }

// Registration says how often regions were registered with the adapter, and how long
// that took together.
func (s *Server) Registration() (times uint64, took time.Duration) {
	return s.registrations.Load(), time.Duration(s.registeredNs.Load())
}

// AccessErrors counts queue pairs that died of what their client sent, such as a wrong key.
func (s *Server) AccessErrors() uint64 { return s.access.Load() }

// Serve accepts the sockets of lanes until the listener fails or Close is called,
// which makes it return nil.
func (s *Server) Serve(l net.Listener) error {
	return host.Accept(s.ctx, l, "verbs", s.log, s.take)
}

func (s *Server) take(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	if len(s.strangers) == maxStrangers {
		s.strangers[0].Close()
		s.strangers = slices.Delete(s.strangers, 0, 1)
	}
	s.strangers = append(s.strangers, nc)
	s.served.Go(func() {
		defer nc.Close()
		l, err := s.greet(nc)
		s.known(nc)
		if err != nil {
			s.log.Debug("verbs fabric: hello", "peer", nc.RemoteAddr(), "error", err)
			return
		}
		l.serve()
		s.leave(l)
	})
}

// leave ends a lane whose client is gone. It does not give up before the drain.
func (s *Server) leave(l *lane) {
	if err := l.finish(context.Background(), rdma.ErrBroken); err != nil {
		s.log.Error("verbs fabric: a queue pair cannot be ended", "session", l.ticket.Session, "error", err)
	}
}

func (s *Server) known(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.strangers, nc); i >= 0 {
		s.strangers = slices.Delete(s.strangers, i, i+1)
	}
}

// greet reads the hello, admits the lane and answers. An older lane of that number is
// ended first: a welcome proves that it is dead.
func (s *Server) greet(nc net.Conn) (*lane, error) {
	nc.SetDeadline(time.Now().Add(helloTimeout))
	var b [introBytes + host.HelloBytes]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return nil, err
	}
	if err := checkIntro(b[:introBytes]); err != nil {
		return nil, err
	}
	hello, err := host.DecodeHello(b[introBytes:])
	if err != nil {
		return nil, err
	}
	l, err := s.admit(&hello, nc)
	own := endpoint{port: s.port, addr: s.device.caps.GID.As16()}
	if l != nil {
		own.nonce = l.nonce
	}
	w := host.Welcome{Err: err, Node: s.node, Incarnation: s.incarnation}
	nc.SetReadDeadline(time.Now().Add(s.patience)) // until the queue pair is connected
	nc.SetWriteDeadline(time.Now().Add(helloTimeout))
	_, sendErr := nc.Write(own.append(w.Append(b[:0])))
	if l != nil && sendErr != nil {
		s.leave(l)
	}
	return l, errors.Join(err, sendErr)
}

// admit takes in a lane of the ticket's session.
func (s *Server) admit(h *host.Hello, nc net.Conn) (*lane, error) {
	t := &h.Ticket
	if t.Cluster != s.cluster || !t.Verify(s.key) {
		return nil, rdma.ErrTicket
	}
	l := s.newLane(nc, h.Lane, h.Attempt, t)
	for {
		old, err := s.enter(l)
		if err != nil {
			return nil, err
		}
		if old == nil {
			return l, nil
		}
		if err := old.finish(s.ctx, rdma.ErrBroken); err != nil {
			return nil, err
		}
	}
}

func (s *Server) newLane(nc net.Conn, number uint32, attempt uint64, t *rdma.Ticket) *lane {
	l := &lane{server: s, nc: nc, number: number, attempt: attempt, ticket: *t, flushed: make(chan struct{}), bound: make(chan C.uint32_t, 1)}
	rand.Read(l.nonce[:])
	return l
}

// enter adds a lane, or returns the one that is in its place. A lane with an error
// has been removed again.
func (s *Server) enter(l *lane) (old *lane, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &l.ticket
	if s.closed {
		return nil, rdma.ErrBroken
	}
	if !s.ended.Admits(t.Serial) {
		return nil, rdma.ErrRevoked
	}
	ses := s.sessions[t.Serial]
	if ses != nil && ses.lanes[l.number] != nil {
		old := ses.lanes[l.number]
		if old.attempt > l.attempt {
			return nil, errLate
		}
		return old, nil
	}
	if ses == nil && len(s.sessions) >= s.limits.Sessions || ses != nil && len(ses.lanes) >= s.limits.LanesPerSession && t.Serial != host.LoopSerial || len(s.lanes) >= maxLanes {
		return nil, rdma.ErrLimit
	}
	d, err := s.domain(t.Tenant)
	if err != nil {
		return nil, err
	}
	if err := s.add(l, d); err != nil {
		return nil, err
	}
	if ses == nil {
		ses = &session{ticket: *t, since: time.Now(), lanes: make(map[uint32]*lane)}
		s.sessions[t.Serial] = ses
	}
	ses.lanes[l.number] = l
	return nil, nil
}

// add makes a lane's queue pair, which then waits for its client.
// Preconditions: mu is held.
func (s *Server) add(l *lane, d *domain) error {
	s.nextID++
	l.id = s.nextID
	if err := l.create(d); err != nil {
		s.log.Warn("verbs fabric: queue pair", "error", err)
		return err
	}
	s.lanes[l.id] = l
	s.joins[l.nonce] = l
	d.lanes++
	return nil
}

// domain is the protection domain of a tenant.
// Preconditions: mu is held.
func (s *Server) domain(tenant uint32) (*domain, error) {
	if d := s.domains[tenant]; d != nil {
		return d, nil
	}
	pd := C.q_pd(s.device.ctx)
	if pd == nil {
		return nil, fmt.Errorf("%w: protection domain of tenant %d: the device has no more", rdma.ErrLimit, tenant)
	}
	d := &domain{pd: pd}
	s.domains[tenant] = d
	return d, nil
}

// drain passes on the flushes of queue pairs in the error state.
func (s *Server) drain() {
	var done [16]C.q_completion
	for {
		n := C.q_drains_wait(s.channel, s.drains, C.int(s.wake), &done[0], C.int(len(done)))
		if n == 0 {
			return
		}
		if n < 0 {
			s.log.Error("verbs fabric: completion queue failed: no session can be fenced, stop this node", "error", unix.Errno(-n))
			return
		}
		for _, d := range done[:n] {
			s.mu.Lock()
			l := s.lanes[uint64(d.id)&^bindID]
			s.mu.Unlock()
			switch {
			case l == nil:
			case d.id&bindID != 0:
				l.bound <- C.uint32_t(d.status) // has room, and one is under way
			case d.status != C.IBV_WC_WR_FLUSH_ERR:
				l.spoke()
			case l.flush():
				s.access.Add(1)
				s.offend(l.ticket.Serial)
			}
		}
	}
}

// offend counts a queue pair that died of what its client sent, which a correct client
// causes only when a region's keys have changed, once for each lane and region. A
// session that goes on so within a minute is ended.
func (s *Server) offend(serial uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if serial == host.LoopSerial || s.closed {
		return
	}
	if now := time.Now(); now.Sub(s.counting) > time.Minute || len(s.offences) >= s.limits.Sessions {
		clear(s.offences)
		s.counting = now
	}
	s.offences[serial]++
	if s.offences[serial] <= s.limits.Offences {
		return
	}
	delete(s.offences, serial)
	s.expelled.Add(1)
	s.log.Warn("verbs fabric: session ended: it was refused too often", "serial", serial, "limit", s.limits.Offences)
	// Elsewhere: a fence waits for flushes, which this goroutine passes on.
	s.served.Go(func() {
		if err := s.Fence(s.ctx, serial); err != nil && s.ctx.Err() == nil {
			s.log.Error("verbs fabric: a session cannot be ended", "serial", serial, "error", err)
		}
	})
}

// Expelled is how many sessions were ended because they were refused too often.
func (s *Server) Expelled() uint64 { return s.expelled.Load() }

// Fence ends sessions. When it returns nil, no verb of theirs changes a byte on
// this node, and none will be admitted again.
func (s *Server) Fence(ctx context.Context, serials ...uint64) error {
	s.mu.Lock()
	for _, serial := range serials {
		s.ended.Fence(serial)
	}
	s.mu.Unlock()
	return s.endSessions(ctx, func(serial uint64) bool { return slices.Contains(serials, serial) })
}

// Settle ends every session with a serial below next that is not in live, as
// Fence does; later it admits only those of live below next.
func (s *Server) Settle(ctx context.Context, next uint64, live []uint64) error {
	s.mu.Lock()
	s.ended.Settle(next, live)
	var gone []uint64
	for serial := range s.sessions {
		if !s.ended.Admits(serial) {
			gone = append(gone, serial)
		}
	}
	s.mu.Unlock()
	return s.endSessions(ctx, func(serial uint64) bool { return slices.Contains(gone, serial) })
}

func (s *Server) endSessions(ctx context.Context, chosen func(serial uint64) bool) error {
	s.mu.Lock()
	var lanes []*lane
	for serial, ses := range s.sessions {
		if chosen(serial) {
			for _, l := range ses.lanes {
				lanes = append(lanes, l)
			}
		}
	}
	s.mu.Unlock()
	return finishAll(ctx, lanes, rdma.ErrRevoked)
}

// finishAll ends lanes: all queue pairs are stopped before the first drain is awaited.
func finishAll(ctx context.Context, lanes []*lane, why error) error {
	for _, l := range lanes {
		l.stop(why)
	}
	for _, l := range lanes {
		if err := l.finish(ctx, why); err != nil {
			return err
		}
	}
	return nil
}

// Close ends all lanes, closes all regions and gives the device back.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	lanes := make([]*lane, 0, len(s.lanes))
	for _, l := range s.lanes {
		lanes = append(lanes, l)
	}
	for _, nc := range s.strangers {
		nc.Close()
	}
	regions := make([]*region, 0, len(s.regions))
	for _, r := range s.regions {
		regions = append(regions, r)
	}
	s.mu.Unlock()
	s.cancel()
	if err := finishAll(ctx, lanes, rdma.ErrBroken); err != nil {
		return err
	}
	s.served.Wait()
	for _, r := range regions {
		if err := r.cut(ctx); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.device == nil {
		return nil
	}
	for tenant, d := range s.domains {
		if err := problem("freeing a protection domain", C.q_free_pd(d.pd)); err != nil {
			return err
		}
		delete(s.domains, tenant)
	}
	unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	s.drained.Wait()
	unix.Close(s.wake)
	if err := problem("destroying the completion queue", C.q_drains_close(s.channel, s.drains)); err != nil {
		return err
	}
	if err := s.deafen(); err != nil {
		return err
	}
	err := s.device.close()
	s.device = nil
	return err
}
