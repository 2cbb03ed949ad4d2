//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

const (
	// helloTimeout bounds how long a connection may take until its hello is accepted.
	helloTimeout = 5 * time.Second
	// maxPreAuth bounds the connections whose hello is not accepted yet.
	maxPreAuth = 256
	// maxLanes bounds the lanes of a node. The queue of flushes has three entries for each: one
	// for a bind, one for an answer.
	maxLanes = 8192
	// bindID marks the completions of binds among those of receives.
	bindID = 1 << 63
	// sendID marks those of answers.
	sendID = 1 << 62
	// flushers is how many goroutines flush for clients, hashers how many hash: so many processors at most are busy with that.
	flushers = 4
	hashers  = 1
	actors   = 4 // execute chains; one more those that take long
	// bindTimeout bounds how long an adapter may take to bind or invalidate a window, which
	// is a work request of microseconds behind at most one other.
	bindTimeout = 5 * time.Second
	// drainTimeout bounds how long the flush of a queue pair in the error state may take,
	// which is microseconds behind the work requests under way.
	drainTimeout = 30 * time.Second
	// answerTimeout bounds how long a client may take to accept an answer.
	answerTimeout = 5 * time.Second
)

// Server has the adapter execute verbs on a node's regions, and ends that access. It does for
// verbs what host.Access does for the other providers.
type Server struct {
	host.Verifier
	own    *keyring.Signer    // of the loop's tickets
	limits host.Limits        // without zeros; constant
	log    *slog.Logger       // never nil
	device *device            // nil after Close
	ctx    context.Context    // ends with Close
	cancel context.CancelFunc // of ctx

	channel  *C.struct_ibv_comp_channel   // wakes drain
	drains   *C.struct_ibv_cq             // completion queue of all lanes: flushes of their receives, and binds
	events   *C.struct_rdma_event_channel // of the connection manager
	listener *C.struct_rdma_cm_id         // takes requests to connect
	port     uint16                       // of the listener
	wake     int                          // eventfd that ends drain and meet
	patience time.Duration                // joinTimeout
	binding  time.Duration                // bindTimeout
	draining time.Duration                // drainTimeout
	windows  bool                         // of type 2, for each lane and region
	plain    atomic.Bool                  // a window was refused: regions opened from now on have none
	mail     *host.Access                 // of the lanes' mailboxes; no region is opened in it
	acts     *host.Access                 // executes what clients' messages have, in the processors' domain; nil: adapters execute atomics
	flushes  bool                         // regions take native FLUSHes

	asks    *turns[*lane]       // lanes that have not ended and whose clients ask to have ranges flushed
	hashes  *turns[*lane]       // the same, hashed: a durable commit waits for no hash
	chains  *turns[*lane]       // the same, executed
	slow    *turns[*lane]       // the same, of chains that hash or flush much: no other one waits behind them
	left    func(serial uint64) // see OnLeft
	served  sync.WaitGroup      // sockets
	drained sync.WaitGroup      // drain, meet and work
	access  atomic.Uint64       // queue pairs that died of what their client sent
	strays  atomic.Uint64       // requests to connect that were refused

	registrations, registeredNs, expelled, verified atomic.Uint64 // for Registration, Expelled and VerifiedBytes

	async  *events    // of the device
	failed chan error // why the node has to end

	mailMu    sync.Mutex                        // guards mailboxes
	mailboxes map[*host.Memory]mailRegistration // of those that a lane has opened over verbs

	mu       sync.Mutex          // guards what follows; taken after region.mu where both are held
	regions  map[uint32]*region  // every region that was ever served or closed here: epochs must not fall
	domains  map[uint32]*domain  // by tenant
	sessions map[uint64]*session // by serial, while they have lanes
	lanes    map[uint64]*lane    // by id
	joins    map[[16]byte]*lane  // whose client has yet to connect, by nonce
	nextID   uint64              // of the lane added last
	ended    host.Ended          // sessions that are never admitted again
	offences map[uint64]uint64   // by serial; see offend
	counting time.Time           // since then
	preAuth  []net.Conn          // oldest first
	closed   bool                // Close has begun: nothing is admitted or served any more
}

// errLate: the client has connected again meanwhile.
var errLate = fmt.Errorf("%w: a later connection has this lane", rdma.ErrBroken)

// session is a session that has lanes here. Guarded by Server.mu.
type session struct {
	ticket rdma.Ticket      // of the lane that came first
	since  time.Time        // when that lane came
	lanes  map[uint32]*lane // by number
}

// domain is the protection domain of one tenant, which keeps it apart from the others.
type domain struct {
	pd    *C.struct_ibv_pd // memory registered in it is out of reach of queue pairs of other domains
	lanes int              // guarded by Server.mu
}

// NewServer opens the device. Tickets are those signed with a key of the ring, which may change.
func NewServer(cluster [16]byte, keys *keyring.Ring, node uint32, incarnation uint64, limits host.Limits, c Config, log *slog.Logger) (*Server, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if limits.Sessions == 0 {
		limits.Sessions = host.DefaultSessions
	}
	if limits.Lanes == 0 {
		limits.Lanes = host.DefaultLanes
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
		limits: limits, log: log, device: dev, patience: joinTimeout, binding: bindTimeout, draining: drainTimeout,
		regions: make(map[uint32]*region), domains: make(map[uint32]*domain),
		asks: newTurns[*lane](), hashes: newTurns[*lane](), chains: newTurns[*lane](), slow: newTurns[*lane](), failed: make(chan error, 1), sessions: make(map[uint64]*session), lanes: make(map[uint64]*lane), joins: make(map[[16]byte]*lane), offences: make(map[uint64]uint64),
	}
	var seed [keyring.SeedBytes]byte
	rand.Read(seed[:])
	s.own = keyring.NewSigner(seed)
	s.Verifier = host.Verifier{Cluster: cluster, Keys: keys, Own: keyring.NewRing(s.own.Public()), Node: node, Incarnation: incarnation}
	s.mail, s.mailboxes = host.New(cluster, keys, node, incarnation, limits), make(map[*host.Memory]mailRegistration)
	if dev.acts() {
		s.acts = host.New(cluster, keys, node, incarnation, limits)
	}
	if e := C.q_drains_open(dev.ctx, C.int((2+dev.receives())*maxLanes), C.uint32_t(incarnation>>1), &s.channel, &s.drains); e != 0 {
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
	if s.async, err = dev.follow(s.heard); err != nil {
		return nil, errors.Join(err, s.deafen(), unix.Close(s.wake), problem("destroying the completion queue", C.q_drains_close(s.channel, s.drains)), dev.close())
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.drained.Go(s.drain)
	s.drained.Go(s.meet)
	for range flushers {
		s.drained.Go(func() { s.work(s.asks) })
	}
	for range hashers {
		s.drained.Go(func() { s.work(s.hashes) })
	}
	if s.acts != nil {
		for range actors {
			s.drained.Go(func() { s.serveActs(s.chains) })
		}
		s.drained.Go(func() { s.serveActs(s.slow) })
	}
	s.chooseWindows()
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

// AccessErrors counts queue pairs that failed because of what their client sent, such as a wrong
// key.
func (s *Server) AccessErrors() uint64 { return s.access.Load() }

// OnLeft sets a function that is called when the last lane of a session has ended and this node
// has not ended it; see host.Access. f must not block.
// Preconditions: nothing is served yet.
func (s *Server) OnLeft(f func(serial uint64)) { s.left = f }

// Serve accepts the sockets of lanes until the listener fails or Close is called,
// which makes it return nil.
func (s *Server) Serve(l net.Listener) error {
	return host.Accept(s.ctx, l, "verbs", s.log, s.take)
}

// heard handles an asynchronous event of the device. A failure of its completion queue ends the
// server, because all fences depend on that queue.
func (s *Server) heard(event string, kind eventKind) {
	switch kind {
	case eventFatal, eventQueue:
		s.fail(fmt.Errorf("event of the device: %s", event))
	case eventTold:
		s.log.Info("verbs fabric: event of the device", "device", s.device.caps.Device, "event", event)
	default:
		s.log.Warn("verbs fabric: event of the device", "device", s.device.caps.Device, "event", event)
	}
}

// fail reports that the adapter cannot serve any more. Its verbs cannot be fenced, nor told
// apart, so the process has to end: then the kernel takes all access away.
func (s *Server) fail(err error) {
	err = fmt.Errorf("%w: %s: %w: start this node again when the adapter is back", ErrDevice, s.device.caps.Device, err)
	s.log.Error("verbs fabric: the adapter has failed", "error", err)
	select {
	case s.failed <- err:
	default: // it has been said
	}
}

// Err yields why the adapter cannot serve any more.
func (s *Server) Err() <-chan error { return s.failed }

// Events counts the device's asynchronous events, by the library's names.
func (s *Server) Events() map[string]uint64 { return s.async.snapshot() }

// Close ends all lanes, closes all regions and gives the device back.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	lanes := make([]*lane, 0, len(s.lanes))
	for _, l := range s.lanes {
		lanes = append(lanes, l)
	}
	for _, nc := range s.preAuth {
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
	if err := s.mail.Close(ctx); err != nil {
		return err
	}
	if s.acts != nil {
		if err := s.acts.Close(ctx); err != nil {
			return err
		}
	}
	for _, r := range regions {
		if err := r.cut(ctx); err != nil {
			return err
		}
	}
	s.quiet()
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
	unix.Close(s.wake)
	s.wake = -1 // its number may belong to another file
	if err := problem("destroying the completion queue", C.q_drains_close(s.channel, s.drains)); err != nil {
		return err
	}
	if err := s.deafen(); err != nil {
		return err
	}
	s.async.close()
	err := s.device.close()
	s.device = nil
	return err
}

// quiet ends drain, meet and the workers, and waits for them. It must not hold mu, which they
// lock.
func (s *Server) quiet() {
	s.asks.close()
	s.hashes.close()
	s.chains.close()
	s.slow.close()
	s.mu.Lock()
	if s.device != nil {
		unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	s.mu.Unlock()
	s.drained.Wait()
}
