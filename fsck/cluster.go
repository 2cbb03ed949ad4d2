package fsck

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/control"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/internal/wire"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/slab"
)

// This file has the sessions of a check, and its connections to nodes.

// Config of a check of a cluster.
type Config struct {
	// Controllers are base URLs; the one that leads is used.
	Controllers []string
	Token       string
	TLS         *tls.Config
	// FabricTLS encrypts connections to nodes over tcp; nil: plain.
	FabricTLS *tcp.TLS
	// Rails and RailPolicy are as in client.Config.
	Rails      []string
	RailPolicy string
	// Transport is "auto", "shm" or "tcp"; "" means auto.
	Transport string
	// Wire is the network of a simulation; nil means the host's.
	Wire *wire.Wire
	// Regions to check; none means all.
	Regions []uint32
	// Tenant to check, by number; nil means all.
	Tenant *uint32
	// Only is the one kind of findings that the report has. Empty: all kinds.
	Only Kind
	// Progress is called with the blocks done so far, of all blocks in use. May be nil.
	Progress func(done, total int)
	// Object is called for every object that is LIVE. May be nil.
	Object func(Object)
	// Restart is called before a check begins anew because a region changed its configuration
	// in the middle (a failover, a moved primary): Object is called for every object again.
	// Where it is nil and Object is not, such a check ends with ErrChanged.
	Restart func()
}

// attempts bounds how often a check begins anew behind changes of configuration.
const attempts = 5

// ErrUnreachable: no controller answers, or a node's memory cannot be reached.
var ErrUnreachable = errors.New("unreachable")

// ErrUnchecked: the check has left out regions that are not open, or of which some replica
// cannot be reached.
var ErrUnchecked = errors.New("not checked")

// Cluster checks the open regions of a cluster. It opens a read-only session and
// ends it again.
//
// Where it leaves out a region it returns the report of the others and an error that names
// the region and is ErrUnchecked. Objects that lie partly in such a region are not judged:
// no chunk is an orphan while an index that may name it cannot be read.
func Cluster(ctx context.Context, cfg Config) (*Report, error) {
	for attempt := 1; ; attempt++ {
		report, err := cluster(ctx, cfg)
		if !errors.Is(err, ErrChanged) || attempt == attempts || cfg.Object != nil && cfg.Restart == nil {
			return report, err
		}
		if cfg.Restart != nil {
			cfg.Restart()
		}
	}
}

// cluster is one attempt.
func cluster(ctx context.Context, cfg Config) (*Report, error) {
	s, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { s.beat(ctx, cancel) })
	defer func() {
		cancel(nil)
		wg.Wait()
		s.close()
	}()
	if err := s.learnSessions(ctx); err != nil {
		return nil, err
	}
	regions, unchecked, err := s.regions(ctx)
	if err != nil {
		return nil, err
	}
	report, err := Regions(ctx, regions, Options{
		Only:     cfg.Only,
		Round:    s.round,
		Session:  func(id uint32) SessionState { return s.state(ctx, id) },
		Sessions: func() (func(uint32) SessionState, error) { return s.listSessions(ctx) },
		Complete: func() (bool, error) { return s.complete(ctx, regions) },
		Writers:  func() bool { return s.writers.Load() },
		Progress: cfg.Progress,
		Object:   cfg.Object,
		Pause: func(attempt int) {
			// 1, 2, 4 .. 128 ms: longer than any operation of a client that is well.
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond << min(attempt-1, 7)):
			}
		},
	})
	if report != nil {
		report.Writers = s.writers.Load()
		report.Unchecked = unchecked
		report.tenants = map[uint32]uint32{}
		for _, r := range s.table.GetRegions() {
			report.tenants[r.Id] = r.Tenant
		}
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, ctx.Err()) {
		err = cause
	}
	if err == nil {
		err = uncheckedError(unchecked)
	}
	return report, err
}

// uncheckedError names the regions that were left out; nil if none was.
func uncheckedError(unchecked []Unchecked) error {
	const most = 8
	var texts []string
	for _, u := range unchecked[:min(len(unchecked), most)] {
		texts = append(texts, u.String())
	}
	if more := len(unchecked) - most; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	if texts == nil {
		return nil
	}
	return fmt.Errorf("%d regions were %w: %s", len(unchecked), ErrUnchecked, strings.Join(texts, "; "))
}

// session is what a check is to the controllers: a session in each tenant whose regions it
// checks, kept alive by a goroutine of its own.
type session struct {
	cfg     Config
	http    *http.Client                 // to controllers
	leases  []*lease                     // one for each tenant whose regions are checked
	lease   time.Duration                // between heartbeats at most
	table   *quarrypb.Table              // as read when the check began
	conns   []rdma.Conn                  // all that were made, to close them
	writers atomic.Bool                  // other sessions could write at some time of the check
	reclaim atomic.Uint64                // epoch, as heard last
	began   atomic.Uint64                // reclaim epoch in which the present round began
	known   func(id uint32) SessionState // by the list of sessions that was made last
	asked   map[uint32]bool              // not in it even after asking again
}

// lease is a session in one tenant: nodes open regions to sessions of their tenant only.
type lease struct {
	tenant uint32            // its number
	ticket *rdma.Credentials // shown to nodes
	proof  []byte            // shown to controllers
}

// openTimeout bounds the wait for a controller that leads.
const openTimeout = 15 * time.Second

// settleTimeout bounds the wait for regions that are being reconciled.
const settleTimeout = 5 * time.Second

// open opens the sessions of a check and reads the table.
func open(ctx context.Context, cfg Config) (*session, error) {
	s := &session{cfg: cfg, asked: map[uint32]bool{}}
	s.http = &http.Client{Transport: cfg.Wire.Transport(userdir.Transport(&http.Transport{TLSClientConfig: cfg.TLS, DialContext: (&net.Dialer{Timeout: time.Second}).DialContext, ForceAttemptHTTP2: true}))}
	octx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	first := uint32(0)
	if cfg.Tenant != nil {
		first = *cfg.Tenant
	}
	err := s.join(octx, first)
	if err != nil {
		s.http.CloseIdleConnections()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%w: controllers %s: %w", ErrUnreachable, strings.Join(cfg.Controllers, ", "), err)
	}
	if s.table, err = s.settledTable(octx); err != nil {
		s.close()
		return nil, err
	}
	for _, r := range s.table.GetRegions() {
		if s.leaseIn(r.Tenant) == nil && s.wants(r) {
			if err := s.join(octx, r.Tenant); err != nil {
				s.close()
				return nil, err
			}
		}
	}
	s.reclaim.Store(s.table.GetReclaimEpoch())
	s.began.Store(s.table.GetReclaimEpoch())
	return s, nil
}

// join opens a session in a tenant.
func (s *session) join(ctx context.Context, tenant uint32) error {
	host, _ := os.Hostname()
	l := &lease{tenant: tenant, ticket: rdma.NewCredentials()}
	res, err := ask(ctx, s, &quarrypb.OpenSessionRequest{
		Name: fmt.Sprintf("fsck@%s:%d", host, os.Getpid()), Rights: uint32(rdma.ReadOnly), Token: s.cfg.Token,
		// A region that changes ends the check with an error: no failover waits for it.
		Agent: true, Key: l.ticket.Holder[:], Tenant: tenant}, quarrypbconnect.ControllerClient.OpenSession)
	if err != nil {
		return err
	}
	if err := l.ticket.Accept(res.Ticket); err != nil {
		return err
	}
	if l.proof = res.Proof; res.LeaseMs == 0 {
		return errors.New("the controller's answer has no lease")
	}
	s.lease = time.Duration(res.LeaseMs) * time.Millisecond
	s.leases = append(s.leases, l)
	return nil
}

// leaseIn is the session in a tenant; nil if there is none.
func (s *session) leaseIn(tenant uint32) *lease {
	for _, l := range s.leases {
		if l.tenant == tenant {
			return l
		}
	}
	return nil
}

// hasSlabs says whether a region holds slabs. fsck cannot check plain bytes.
func hasSlabs(r *quarrypb.Region) bool {
	return r.Kind == quarrypb.RegionKind_REGION_KIND_SLABS || openWords(r)
}

// openWords says whether V of its slabs may be open.
func openWords(r *quarrypb.Region) bool { return r.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS }

// wants says whether a region is to be checked.
func (s *session) wants(r *quarrypb.Region) bool {
	return hasSlabs(r) && (s.cfg.Tenant == nil || *s.cfg.Tenant == r.Tenant) && (len(s.cfg.Regions) == 0 || slices.Contains(s.cfg.Regions, r.Id))
}

// ask puts a request to the controller that leads.
func ask[Q, A any](ctx context.Context, s *session, q *Q, method control.Method[Q, A]) (*A, error) {
	a, _, err := control.Ask(ctx, control.Controllers{URLs: s.cfg.Controllers, HTTP: s.http, Token: s.cfg.Token}, q, method)
	return a, err
}

// settledTable reads the table until no region to check is being reconciled, which takes
// fractions of a second, or until settleTimeout. The session of an agent is pushed no table.
func (s *session) settledTable(ctx context.Context) (*quarrypb.Table, error) {
	recovering := func(r *quarrypb.Region) bool {
		return s.wants(r) && r.Shown() == quarrypb.RegionState_REGION_STATE_RECOVERING
	}
	for until := time.Now().Add(settleTimeout); ; {
		t, err := s.readTable(ctx)
		if err != nil || !slices.ContainsFunc(t.Regions, recovering) || time.Now().After(until) {
			return t, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// readTable reads the table of the regions that the caller is shown.
func (s *session) readTable(ctx context.Context) (*quarrypb.Table, error) {
	t, err := ask(ctx, s, &quarrypb.ReadTableRequest{}, quarrypbconnect.ControllerClient.ReadTable)
	if err != nil {
		return nil, fmt.Errorf("read the table: %w", err)
	}
	return t, nil
}

// round begins another round of the check. Each is an operation of its own: blocks are
// judged by headers that are READ with them. So the session acknowledges the reclaim
// epoch that its round began in, and no scrubbed session has to wait for the end of a
// long check. Ids of sessions may belong to others from then on: they are learned again.
func (s *session) round() {
	if now := s.reclaim.Load(); now != s.began.Load() {
		s.known = func(uint32) SessionState { return slab.SessionGone }
		clear(s.asked)
		s.began.Store(now)
	}
}

// beat keeps the lease until the context ends. The regions stay those of the table that
// the check began with. A change of one ends the check, so that no failover waits for it.
func (s *session) beat(ctx context.Context, cancel context.CancelCauseFunc) {
	until := time.Now().Add(s.lease)
	revision := s.table.GetRevision()
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(s.lease / 3):
		}
		sent := time.Now()
		hctx, done := context.WithTimeout(ctx, s.lease/3)
		var res *quarrypb.HeartbeatResponse
		var err error
		for i := 0; i < len(s.leases) && err == nil; i++ {
			res, err = ask(hctx, s, &quarrypb.HeartbeatRequest{Serial: s.leases[i].ticket.Serial, TableRevision: revision,
				ReclaimEpoch: s.began.Load(), Proof: s.leases[i].proof}, quarrypbconnect.ControllerClient.Heartbeat)
		}
		done()
		switch {
		case err == nil:
			until = sent.Add(s.lease)
			revision = max(revision, res.Table.GetRevision())
			s.reclaim.Store(max(s.reclaim.Load(), res.ReclaimEpoch))
		case ctx.Err() == nil && time.Now().After(until):
			cancel(fmt.Errorf("the lease of the check has run out: %w", err))
			return
		}
	}
}

// close closes connections and sessions.
func (s *session) close() {
	for _, c := range s.conns {
		c.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, l := range s.leases {
		_, _ = ask(ctx, s, &quarrypb.CloseSessionRequest{Serial: l.ticket.Serial, Proof: l.proof}, quarrypbconnect.ControllerClient.CloseSession)
	}
	s.http.CloseIdleConnections()
}

// listSessions lists the sessions as they are now.
func (s *session) listSessions(ctx context.Context) (func(id uint32) SessionState, error) {
	res, err := ask(ctx, s, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
	if err != nil {
		return nil, fmt.Errorf("list of sessions: %w", err)
	}
	states := map[uint32]SessionState{}
	for _, x := range res.Sessions {
		state := slab.ParseSessionState(x.State)
		states[x.Session] = state
		if !state.Over() && rdma.Rights(x.Rights) != rdma.ReadOnly {
			s.writers.Store(true)
		}
	}
	return func(id uint32) SessionState { return states[id] }, nil
}

// learnSessions lists the sessions anew.
func (s *session) learnSessions(ctx context.Context) error {
	known, err := s.listSessions(ctx)
	if err == nil {
		s.known = known
	}
	return err
}

// complete says whether the table has no region now that is not checked.
func (s *session) complete(ctx context.Context, checked []Region) (bool, error) {
	t, err := s.readTable(ctx)
	if err != nil {
		return false, err
	}
	for _, r := range t.Regions {
		if hasSlabs(r) && (s.cfg.Tenant == nil || *s.cfg.Tenant == r.Tenant) && !slices.ContainsFunc(checked, func(c Region) bool { return c.ID == r.Id }) {
			return false, nil
		}
	}
	return true, nil
}

// state of a session; one that is not known may be new, so the controller is asked again, once.
func (s *session) state(ctx context.Context, id uint32) SessionState {
	if st := s.known(id); st != slab.SessionGone {
		return st
	}
	if !s.asked[id] && s.learnSessions(ctx) == nil {
		s.asked[id] = true
	}
	return s.known(id)
}

// regions connects to every in-sync replica of the regions to check. Those that are not open,
// or whose replicas cannot be reached, are left out.
func (s *session) regions(ctx context.Context) (out []Region, unchecked []Unchecked, err error) {
	d := &dialled{s: s, nodes: map[uint32]*quarrypb.Node{}, conns: map[end]rdma.Conn{}, errs: map[end]error{}}
	for _, n := range s.table.GetNodes() {
		d.nodes[n.Id] = n
	}
	missing := slices.Clone(s.cfg.Regions)
	for _, r := range s.table.GetRegions() {
		if slices.Contains(s.cfg.Regions, r.Id) && !hasSlabs(r) {
			return nil, nil, fmt.Errorf("region %d %w", r.Id, ErrNoSlabs)
		}
		if !s.wants(r) {
			continue
		}
		missing = slices.DeleteFunc(missing, func(id uint32) bool { return id == r.Id })
		u := Unchecked{Region: r.Id, State: quarrypb.Word(r.Shown())}
		if !r.Usable() {
			u.Why = "it can be checked once it is open"
			unchecked = append(unchecked, u)
			continue
		}
		if len(r.Uuid) != 16 {
			return nil, nil, fmt.Errorf("region %d has a uuid of %d bytes in the table", r.Id, len(r.Uuid))
		}
		reg, err := d.open(ctx, r)
		switch {
		case ctx.Err() != nil:
			return nil, nil, ctx.Err()
		case err != nil:
			u.Why = err.Error()
			unchecked = append(unchecked, u)
		default:
			out = append(out, reg)
		}
	}
	if len(missing) > 0 {
		return nil, nil, fmt.Errorf("%w: %d", ErrNoRegion, missing[0])
	}
	return out, unchecked, nil
}

// end is what a connection leads to: a node, and the regions of a tenant there.
type end struct{ node, tenant uint32 }

// dialled are the connections of a check: one to each node for each tenant, made when the first region on it
// is opened, and tried once.
type dialled struct {
	s     *session
	nodes map[uint32]*quarrypb.Node // of the table
	conns map[end]rdma.Conn         // made so far
	errs  map[end]error             // of those that cannot be reached
}

// open opens every in-sync replica of a region.
func (d *dialled) open(ctx context.Context, r *quarrypb.Region) (Region, error) {
	reg := Region{ID: r.Id, UUID: [16]byte(r.Uuid), Epoch: r.Epoch, Bytes: r.SizeBytes, OpenWords: openWords(r)}
	for _, rep := range r.Replicas {
		if rep.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || len(reg.Replicas) == slab.MaxListed {
			continue
		}
		n := d.nodes[rep.Node]
		if n == nil {
			return reg, fmt.Errorf("the table has no node %d, which holds a replica", rep.Node)
		}
		to := end{n.Id, r.Tenant}
		if d.conns[to] == nil && d.errs[to] == nil {
			c, err := d.s.dial(ctx, n, d.s.leaseIn(r.Tenant))
			if err != nil {
				d.errs[to] = err
			} else {
				d.conns[to] = c
				d.s.conns = append(d.s.conns, c)
			}
		}
		if err := d.errs[to]; err != nil {
			return reg, err
		}
		c := d.conns[to]
		w, err := c.Open(ctx, r.Id, r.Epoch)
		if err != nil {
			return reg, fmt.Errorf("node %s: epoch %d: %w", n.Name, r.Epoch, err)
		}
		reg.Replicas = append(reg.Replicas, &rdma.Target{Conn: c, Window: w})
		reg.Nodes = append(reg.Nodes, n.Name)
	}
	return reg, nil
}

// ErrNoRegion: the table has no such region.
var ErrNoRegion = errors.New("no such region")

// ErrNoSlabs: the region that is to be checked is part of a space.
var ErrNoSlabs = errors.New("holds plain bytes: fsck checks slabs")

// dial connects to a node in one tenant, by shm where the node is on this host, else by tcp.
func (s *session) dial(ctx context.Context, n *quarrypb.Node, as *lease) (rdma.Conn, error) {
	hostID := ""
	if b, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		hostID = strings.TrimSpace(string(b))
	}
	var errs []error
	for _, p := range []quarrypb.Provider{quarrypb.Provider_PROVIDER_SHM, quarrypb.Provider_PROVIDER_TCP} {
		for _, e := range n.Endpoints {
			if e.Provider != p || s.cfg.Transport != "" && s.cfg.Transport != "auto" && s.cfg.Transport != quarrypb.Word(p) ||
				p == quarrypb.Provider_PROVIDER_SHM && e.HostId != hostID {
				continue
			}
			var c rdma.Conn
			var err error
			if p == quarrypb.Provider_PROVIDER_TCP {
				c, err = s.dialTCP(ctx, n, as.ticket.For(n.Id, n.Name))
			} else {
				c, err = shm.NewDialer().Dial(ctx, e.Address, as.ticket.For(n.Id, n.Name), 0)
			}
			if err == nil {
				return c, nil
			}
			errs = append(errs, fmt.Errorf("%s %s: %w", quarrypb.Word(p), e.Address, err))
			if p == quarrypb.Provider_PROVIDER_TCP {
				break // all addresses were tried
			}
		}
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("%w: node %s has no endpoint for transport %s", ErrUnreachable, n.Name, s.cfg.Transport)
	}
	return nil, fmt.Errorf("%w: node %s: %w", ErrUnreachable, n.Name, errors.Join(errs...))
}

// dialTCP connects to a node by the best of its addresses that answers.
func (s *session) dialTCP(ctx context.Context, n *quarrypb.Node, as *rdma.Credentials) (c rdma.Conn, err error) {
	own, err := rail.ParseOwn(s.cfg.Rails)
	if err != nil {
		return nil, err
	}
	strict, err := rail.ParsePolicy(s.cfg.RailPolicy)
	if err != nil {
		return nil, err
	}
	paths, err := rail.Choose(rail.Question{Own: own, Ends: rail.Ends(n.Endpoints, quarrypb.Provider_PROVIDER_TCP), Memory: rail.Memory(n), Strict: strict})
	if err != nil {
		return nil, err
	}
	err = rail.Try(ctx, paths, rail.Answered, func(ctx context.Context, p rail.Path) (err error) {
		d := s.cfg.Wire.Dialer(tcp.Dialer{TLS: s.cfg.FabricTLS, From: p.From, Redundant: len(paths) > 1})
		c, err = d.Dial(ctx, p.End.Address, as, 0)
		return err
	})
	return c, err
}
