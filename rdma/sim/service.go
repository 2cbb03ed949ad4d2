package sim

import (
	"context"
	"fmt"
	"sync"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Service is a node of a fabric as goroutines see it: it checks tickets, keeps one
// connection for each session and lane, and has a lock under which a goroutine that waits
// steps the whole fabric.
type Service struct {
	host.Verifier // set Cluster and Keys
	// LanesPerSession bounds the lanes; 0: 32.
	LanesPerSession uint32

	mu      sync.Mutex        // guards what follows and the fabric, which has this Service alone
	node    *Node             // that it serves
	ids     map[uint64]uint32 // the fabric's session number of a ticket's serial
	lanes   map[laneID]*lane  // present connection of each lane
	tenants map[uint32]uint32 // by region
	boxes   map[laneID]*box   // mailboxes
	// procedures by number, that clients call by messages
	procedures map[uint16]host.Procedure
}

// laneID names a lane of a session.
type laneID struct {
	serial uint64 // of the ticket
	number uint32 // within the session
}

// NewService serves a node.
func NewService(n *Node) *Service {
	return &Service{node: n, ids: map[uint64]uint32{}, lanes: map[laneID]*lane{}, tenants: map[uint32]uint32{}, boxes: map[laneID]*box{}, procedures: map[uint16]host.Procedure{}, LanesPerSession: 32}
}

// id numbers the sessions; all the fabric can tell apart are MaxSession of them.
func (s *Service) id(serial uint64) (uint32, error) {
	id := s.ids[serial]
	if id == 0 {
		if id = uint32(len(s.ids) + 1); id >= MaxSession {
			return 0, fmt.Errorf("%w: the simulated fabric has %d sessions", rdma.ErrLimit, MaxSession)
		}
		s.ids[serial] = id
	}
	return id, nil
}

// Fence ends sessions: when it returns, no verb of them runs any more.
func (s *Service) Fence(serials ...uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, serial := range serials {
		id, err := s.id(serial)
		if err != nil {
			return err
		}
		s.node.Revoke(id)
	}
	return nil
}

// OpenRegion serves a region of so many bytes to a tenant under an epoch; epochs only rise.
func (s *Service) OpenRegion(tenant, region uint32, epoch, bytes uint64, p Profile) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.node.Memory(region)
	if m == nil {
		m = s.node.AddMemory(region, bytes, p)
	}
	s.tenants[region] = tenant
	switch {
	case epoch == m.Epoch && m.IsOpen():
	case epoch <= m.Epoch:
		return fmt.Errorf("region %d is at epoch %d, not to be opened under %d", region, m.Epoch, epoch)
	default:
		m.Open(epoch)
	}
	return nil
}

// CloseRegion ends access up to an epoch.
func (s *Service) CloseRegion(region uint32, epoch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.node.Memory(region); m != nil && epoch >= m.Epoch {
		m.Close()
		m.Epoch = epoch
	}
}

// Stop crashes the node.
func (s *Service) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node.Up {
		s.node.Crash()
	}
}

// Dial connects a lane; a second Dial of the same lane ends the first connection.
func (s *Service) Dial(_ context.Context, as *rdma.Credentials, number uint32) (rdma.Conn, error) {
	challenge := s.Verifier.Challenge()
	hello, err := host.NewHello(as, number, &challenge, host.Binding{})
	if err == nil {
		err = s.Check(&hello, &challenge, host.Binding{})
	}
	if err != nil {
		return nil, err
	}
	t := &as.Ticket
	s.mu.Lock()
	defer s.mu.Unlock()
	id, err := s.id(t.Serial)
	switch {
	case err != nil:
		return nil, err
	case s.node.Revoked(id):
		return nil, rdma.ErrRevoked
	case !t.Room(int(number), int(s.LanesPerSession)):
		return nil, fmt.Errorf("%w: lane %d, a session has %d", rdma.ErrLimit, number, s.LanesPerSession)
	}
	c, err := s.node.fabric.Dial(id, s.node)
	if err != nil {
		return nil, err
	}
	c.ReadOnly = t.Rights == rdma.ReadOnly
	l := &lane{Conn: c, service: s, id: laneID{t.Serial, number}, ticket: *t}
	s.take(l)
	return l, nil
}

// take gives the lane's number to l; the connection that had it ends.
func (s *Service) take(l *lane) {
	if o := s.lanes[l.id]; o != nil && o != l {
		o.Break()
		o.drop()
	}
	s.lanes[l.id] = l
}

// lane is a connection under the service's lock.
type lane struct {
	*Conn
	service *Service    // whose lock every call takes
	id      laneID      // its key in Service.lanes
	ticket  rdma.Ticket // of its hello
}

// Post posts under the service's lock, because several clients share one simulated fabric.
func (l *lane) Post(ch *rdma.Chain) {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	l.Conn.Post(ch)
}

// Wait steps the fabric until the chain has ended. Where nothing can move any more the answer is
// lost.
func (l *lane) Wait(ch *rdma.Chain, _ int64) {
	for {
		l.service.mu.Lock()
		waits := l.waits(ch)
		if waits && !l.fabric.StepAny() {
			l.Break() // nothing moves any more: the answer was lost
		}
		l.service.serveMessages()
		l.service.mu.Unlock()
		if !waits {
			return
		}
	}
}

// Open opens a region of the ticket's tenant.
func (l *lane) Open(ctx context.Context, region uint32, epoch uint64) (rdma.Window, error) {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	if region == rdma.Mailbox && l.ticket.Opens(region, epoch) {
		return l.openMailbox(ctx, epoch)
	}
	if tenant, served := l.service.tenants[region]; !l.ticket.Opens(region, epoch) || served && tenant != l.ticket.Tenant {
		return rdma.Window{}, rdma.ErrTicket
	}
	return l.Conn.Open(ctx, region, epoch)
}

// Reset is that of the simulated connection, and opens the windows again.
func (l *lane) Reset(ctx context.Context) error {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	if err := l.Conn.Reset(ctx); err != nil {
		return err
	}
	l.service.take(l)
	if b := l.service.boxes[l.id]; b != nil {
		b.server.Resume()
	}
	return nil
}

// Close takes the lane out of the service.
func (l *lane) Close() error {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	if l.service.lanes[l.id] == l {
		delete(l.service.lanes, l.id)
	}
	return l.Conn.Close()
}

// Dialer reaches services by name.
type Dialer struct {
	mu       sync.Mutex          // guards services
	services map[string]*Service // by address
}

// Serve makes a service reachable and returns its address.
func (d *Dialer) Serve(s *Service) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.services == nil {
		d.services = map[string]*Service{}
	}
	addr := fmt.Sprintf("sim:%d", len(d.services)+1)
	d.services[addr] = s
	return addr
}

// Provider is "sim".
func (d *Dialer) Provider() string { return "sim" }

// Dial connects a lane of the ticket's session to the service at addr.
func (d *Dialer) Dial(ctx context.Context, addr string, as *rdma.Credentials, lane uint32) (rdma.Conn, error) {
	d.mu.Lock()
	s := d.services[addr]
	d.mu.Unlock()
	if s == nil {
		return nil, fmt.Errorf("%w: no node serves %q", rdma.ErrBroken, addr)
	}
	return s.Dial(ctx, as, lane)
}
