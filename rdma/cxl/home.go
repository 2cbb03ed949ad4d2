package cxl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// Home is the storage node's end of the board. What it has done on its own host, it has every member do, and returns when all have:
// regions are closed and sessions fenced on all hosts or not at all. A host that does not answer holds that up until its agent is back, or
// the operator says that the host is gone. Time alone never completes a command.
type Home struct {
	area  pmem.Mapping
	b     board
	log   *slog.Logger
	begin command // of this incarnation; guarded by giving
	keys  *keyring.Ring
	// changed is called when hosts have joined or left.
	changed func()

	giving chan struct{} // taken by the one command under way, and by what follows
	// What a host that joins has to be told. Guarded by giving.
	next    uint64
	live    []uint64
	fenced  map[uint64]struct{} // that opEndBelow does not cover
	regions map[uint64]*command // open
	closed  map[uint64]uint64   // epochs by region
	told    []keyring.Public

	mu      sync.Mutex // guards members
	members map[int]*member
	cancel  context.CancelFunc // of the goroutine that lets hosts in; nil before Begin
	done    sync.WaitGroup
}

// member is a host that was sent regions, or may have been by an earlier incarnation.
type member struct {
	Endpoint
	slot   int
	run    uint64
	synced bool // it has all that members have
}

// Endpoint is where clients of a host find its agent.
type Endpoint struct{ Host, BootID, Socket string }

const (
	// watchEvery is how often the home looks for hosts that join or leave.
	watchEvery = 20 * time.Millisecond
	// ackEvery is how often it looks for acknowledgements.
	ackEvery = 200 * time.Microsecond
	// litmusWait bounds the wait for the agent's side of the litmus.
	litmusWait = 30 * time.Second
)

// HomeConfig says whose home it is.
type HomeConfig struct {
	Host        string   // name of this host
	Forget      []string // hosts that the operator says are gone: nothing on them maps the device any more
	Format      bool     // makes a board where there is none
	Incarnation uint64   // of the node
	Keys        *keyring.Ring
	Changed     func() // called when hosts have joined or left; must not block
	Log         *slog.Logger
}

// checkHost refuses a name that the board cannot hold.
func checkHost(name string) error {
	if name == "" || len(name) > maxHostName {
		return fmt.Errorf("host %q: want a name of 1 to %d bytes (--host)", name, maxHostName)
	}
	return nil
}

// Area is where a device of some size has its board, and what is left for regions.
func Area(dev *pmem.Device) (regions uint64, err error) {
	units := (BoardBytes + dev.Align - 1) &^ (dev.Align - 1)
	if dev.Bytes < 2*units {
		return 0, fmt.Errorf("%s has %d bytes, and a device for several hosts needs %d more than its regions", dev.Path, dev.Bytes, units)
	}
	return dev.Bytes - units, nil
}

// mapBoard maps the board of a device.
func mapBoard(dev *pmem.Device) (pmem.Mapping, board, error) {
	from, err := Area(dev)
	if err != nil {
		return pmem.Mapping{}, board{}, err
	}
	m, err := dev.Map(from, dev.Bytes-from)
	return m, board{m.Mem}, err
}

// NewHome ends what earlier incarnations have let onto the device. nil error: nothing of it can still write. It waits for hosts that do
// not answer until ctx ends.
func NewHome(ctx context.Context, dev *pmem.Device, c HomeConfig) (_ *Home, err error) {
	if err := checkHost(c.Host); err != nil {
		return nil, err
	}
	h := &Home{log: c.Log, keys: c.Keys, changed: c.Changed, begin: command{op: opBegin, incarnation: c.Incarnation, volatile: dev.Volatile}, giving: make(chan struct{}, 1),
		fenced: map[uint64]struct{}{}, regions: map[uint64]*command{}, closed: map[uint64]uint64{}, members: map[int]*member{}}
	if h.area, h.b, err = mapBoard(dev); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", dev.Path, err), h.area.Unmap())
		}
	}()
	if err = h.b.check(); errors.Is(err, errNoBoard) && c.Format {
		h.b.format()
		err = nil
	}
	if err != nil {
		return nil, err
	}
	if had := h.b.text(atHomeHost, maxText); had != "" && had != c.Host && !slices.Contains(c.Forget, had) {
		return nil, fmt.Errorf("a storage node on host %s serves it: stop that node; if that host is off for good, say so: --host-gone %s", had, had)
	}
	h.b.put(atHomeHost, maxText, c.Host)
	h.recall(c.Forget)
	if err = h.give(ctx, &command{op: opBegin}); err != nil {
		return nil, err
	}
	return h, nil
}

// recall finds the hosts that earlier incarnations have let in. Those that the operator says are gone are free.
func (h *Home) recall(gone []string) {
	for i := range MaxHosts {
		s := h.b.slot(i)
		name := s.text(atName, maxText)
		switch state := s.load(atState); {
		case state == stateMember && slices.Contains(gone, name):
			h.log.Warn("storage node: a host is taken for gone, as the operator says", "host", name)
			s.store(atState, stateFree)
		case state == stateMember:
			h.members[i] = h.memberOf(i)
		case state == stateMaking:
			s.cas(atState, stateMaking, stateFree)
		}
	}
}

// Begin has the members serve the node under its number, and lets hosts in from then on.
func (h *Home) Begin(ctx context.Context, cluster [16]byte, node uint32) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer func() { <-h.giving }()
	h.told = slices.Clone(h.keys.Keys())
	h.begin.cluster, h.begin.node, h.begin.keys = cluster, uint64(node), h.told
	for _, c := range h.all() {
		if err := h.give(ctx, c); err != nil {
			return err
		}
	}
	h.mu.Lock()
	for _, m := range h.members {
		m.synced = true
	}
	some := len(h.members) > 0
	h.mu.Unlock()
	if some { // the node has registered without them
		h.tellChanged()
	}
	if h.cancel == nil {
		watching, cancel := context.WithCancel(context.Background())
		h.cancel = cancel
		h.done.Go(func() { h.watch(watching) })
	}
	return nil
}

// memberOf reads a slot.
func (h *Home) memberOf(i int) *member {
	s := h.b.slot(i)
	return &member{Endpoint: Endpoint{s.text(atName, maxText), s.text(atBootID, maxText), s.text(atSocket, maxSocket)}, slot: i, run: s.load(atRun)}
}

// Endpoints are where clients of other hosts find their agents.
func (h *Home) Endpoints() (all []Endpoint) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range MaxHosts {
		if m := h.members[i]; m != nil && m.synced {
			all = append(all, m.Endpoint)
		}
	}
	return all
}

// take waits for the command under way.
func (h *Home) take(ctx context.Context) error {
	select {
	case h.giving <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("another command to the device's hosts is under way: %w", ctx.Err())
	}
}

// give has all members carry out a command. Preconditions: the caller has taken giving, or nothing else runs yet.
func (h *Home) give(ctx context.Context, c *command) error {
	h.mu.Lock()
	members := make([]*member, 0, len(h.members))
	for _, m := range h.members {
		members = append(members, m)
	}
	h.mu.Unlock()
	if len(members) == 0 {
		return nil
	}
	sequence, err := h.b.give(c)
	if err != nil {
		return err
	}
	for _, m := range members {
		if err := h.await(ctx, m, sequence); err != nil {
			return err
		}
	}
	return nil
}

// await waits until a member has acknowledged a command, or its agent has ended in a way that shows that nothing of it is left: it has
// freed its slot, or another agent has the device's lock on that host, which the former one's clients held as well.
func (h *Home) await(ctx context.Context, m *member, sequence uint64) error {
	s := h.b.slot(m.slot)
	tick := time.NewTicker(ackEvery)
	defer tick.Stop()
	for {
		switch {
		case s.load(atState) != stateMember || s.load(atRun) != m.run:
			h.drop(m)
			return nil
		case s.load(atAcked) >= sequence:
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			why := ""
			if t := s.text(atTrouble, maxTrouble); t != "" {
				why = ": " + t
			}
			return fmt.Errorf("host %s, which maps the device, has not ended access%s: see to its quarry share; if that host is off, restart this node with --host-gone %s (%w)", m.Host, why, m.Host, ctx.Err())
		}
	}
}

// drop forgets a member whose agent has ended.
func (h *Home) drop(m *member) {
	h.mu.Lock()
	known := h.members[m.slot] == m
	if known {
		delete(h.members, m.slot)
	}
	h.mu.Unlock()
	if known {
		h.log.Info("storage node: a host has left the shared device", "host", m.Host)
		h.tellChanged()
	}
}

func (h *Home) tellChanged() {
	if h.changed != nil {
		h.changed()
	}
}

// OpenRegion has the members serve a region under an epoch, which this node serves.
func (h *Home) OpenRegion(ctx context.Context, region uint32, epoch, off, bytes uint64, tenant uint32) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer func() { <-h.giving }()
	if epoch <= h.closed[uint64(region)] {
		return fmt.Errorf("region %d: epoch %d was closed meanwhile", region, epoch)
	}
	c := &command{op: opOpen, region: uint64(region), epoch: epoch, off: off, bytes: bytes, tenant: uint64(tenant)}
	if had := h.regions[c.region]; had != nil && had.epoch > epoch {
		return fmt.Errorf("region %d: epoch %d was opened meanwhile", region, had.epoch)
	}
	h.closed[c.region] = epoch - 1
	h.regions[c.region] = c
	return h.give(ctx, c)
}

// CloseRegion has the members end access to a region up to an epoch. nil: no verb under these epochs runs on any of them.
func (h *Home) CloseRegion(ctx context.Context, region uint32, epoch uint64) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer func() { <-h.giving }()
	c := &command{op: opClose, region: uint64(region), epoch: epoch}
	h.closed[c.region] = max(h.closed[c.region], epoch)
	if had := h.regions[c.region]; had != nil && had.epoch <= epoch {
		delete(h.regions, c.region)
	}
	return h.give(ctx, c)
}

// Fence has the members end sessions, as host.Access.Fence does.
func (h *Home) Fence(ctx context.Context, serials ...uint64) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer func() { <-h.giving }()
	for _, s := range serials {
		h.fenced[s] = struct{}{}
	}
	return h.give(ctx, &command{op: opFence, serials: serials})
}

// EndBelow has the members end sessions, as host.Access.EndBelow does.
func (h *Home) EndBelow(ctx context.Context, next uint64, live []uint64) error {
	if err := h.take(ctx); err != nil {
		return err
	}
	defer func() { <-h.giving }()
	if next >= h.next {
		h.next, h.live = next, slices.Clone(live)
		for s := range h.fenced {
			if s < next && !slices.Contains(live, s) {
				delete(h.fenced, s)
			}
		}
	}
	return h.give(ctx, &command{op: opEndBelow, next: next, serials: live})
}

// watch lets hosts in, and passes on changes of the controllers' keys, until ctx ends.
func (h *Home) watch(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for i := range MaxHosts {
			h.look(ctx, i)
		}
		if keys := h.keys.Keys(); !slices.Equal(keys, h.told) {
			h.tell(ctx, keys)
		}
	}
}

// tell passes keys on.
func (h *Home) tell(ctx context.Context, keys []keyring.Public) {
	ctx, cancel := context.WithTimeout(ctx, litmusWait)
	defer cancel()
	if h.take(ctx) != nil {
		return
	}
	defer func() { <-h.giving }()
	if err := h.give(ctx, &command{op: opKeys, keys: slices.Clone(keys)}); err != nil {
		h.log.Warn("storage node: a host has not taken over the controllers' keys", "error", err)
		return
	}
	h.told = slices.Clone(keys)
	h.begin.keys = h.told
}

// look sees to one slot.
func (h *Home) look(ctx context.Context, i int) {
	s := h.b.slot(i)
	h.mu.Lock()
	m := h.members[i]
	h.mu.Unlock()
	state, run := s.load(atState), s.load(atRun)
	if m != nil && (state != stateMember || run != m.run) {
		h.drop(m)
		m = nil
	}
	switch {
	case m != nil && !m.synced:
		h.sync(ctx, m)
	case m == nil && state == stateMember: // let in as another run, which has ended: this one has been told nothing
		s.cas(atState, stateMember, stateAsks)
	case m == nil && state == stateAsks && s.load(atJudged) != run:
		h.judge(ctx, i, run)
	}
}

// judge runs the litmus with an agent that asks to join, and lets it in if the memory passes.
func (h *Home) judge(ctx context.Context, i int, run uint64) {
	s := h.b.slot(i)
	s.store(atVerdict, verdictLitmus)
	s.store(atJudged, run)
	m := h.memberOf(i)
	report, err := ask(ctx, h.b.mem[atScratch:atScratch+ScratchBytes], 0, joining(), litmusWait)
	if err = errors.Join(err, report.Err()); err != nil {
		h.log.Error("storage node: a host may not map the device", "host", m.Host, "error", err)
		s.store(atVerdict, verdictRefused)
		return
	}
	if h.take(ctx) != nil {
		return
	}
	defer func() { <-h.giving }()
	if h.admit(m) {
		s.store(atVerdict, verdictJoined)
		h.tellAll(ctx, m)
	}
}

// admit makes an agent a member: from here on no command is complete without it. false: it has ended meanwhile.
// Preconditions: the caller holds giving until tellAll has returned. A command in between would reach an agent that serves no incarnation yet.
func (h *Home) admit(m *member) bool {
	s := h.b.slot(m.slot)
	if s.load(atRun) != m.run || !s.cas(atState, stateAsks, stateMember) {
		return false
	}
	h.mu.Lock()
	h.members[m.slot] = m
	h.mu.Unlock()
	return true
}

// sync repeats tellAll for a member that joined while it, or another member, did not answer.
func (h *Home) sync(ctx context.Context, m *member) {
	if h.take(ctx) != nil {
		return
	}
	defer func() { <-h.giving }()
	h.tellAll(ctx, m)
}

// tellAll gives a new member the commands of all. The board has one command at a time for all hosts, so the other members carry them out again; that
// changes nothing there.
// Preconditions: giving is taken.
func (h *Home) tellAll(ctx context.Context, m *member) {
	ctx, cancel := context.WithTimeout(ctx, litmusWait)
	defer cancel()
	for _, c := range h.all() {
		if err := h.give(ctx, c); err != nil {
			h.log.Warn("storage node: a host has joined the shared device and does not answer", "host", m.Host, "error", err)
			return
		}
	}
	h.mu.Lock()
	m.synced = h.members[m.slot] == m
	h.mu.Unlock()
	h.log.Info("storage node: a host has joined the shared device", "host", m.Host, "socket", m.Socket)
	h.tellChanged()
}

// all returns the commands that bring a member to the present state: the incarnation first, then fences and open regions.
// Preconditions: giving is taken.
func (h *Home) all() []*command {
	all := []*command{&h.begin, {op: opEndBelow, next: h.next, serials: h.live}}
	if len(h.fenced) > 0 {
		c := &command{op: opFence}
		for s := range h.fenced {
			c.serials = append(c.serials, s)
		}
		all = append(all, c)
	}
	for _, c := range h.regions {
		all = append(all, c)
	}
	return all
}

// Close ends all access of other hosts, and waits for it until ctx ends. The agents stay, for the next incarnation.
func (h *Home) Close(ctx context.Context) error {
	if h.cancel != nil {
		h.cancel()
		h.done.Wait()
	}
	err := h.take(ctx)
	if err == nil {
		if err = h.give(ctx, &command{op: opBegin}); err == nil {
			h.b.put(atHomeHost, maxText, "")
		}
	}
	return errors.Join(err, h.area.Unmap())
}
