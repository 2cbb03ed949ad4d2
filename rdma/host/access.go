package host

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
)

// ErrEpoch: the epoch is not above one already closed or served here.
var ErrEpoch = errors.New("epoch is not newer than the one this node has")

// Limits of one node. Zero fields take the defaults.
type Limits struct {
	Sessions        int           // with connections, at once; 4096
	Lanes           int           // connections of all sessions; 16384
	LanesPerSession int           // connections of one session; 256
	Offences        uint64        // refusals that a correct client does not cause, before its session is ended; 1000
	Mailboxes       int           // of all sessions, 132 KiB each; 1024
	Watches         int           // words that all sessions watch, some 64 bytes each; 262144, one session at most a quarter
	KillAfter       time.Duration // how long a shm client may stay inside a chain, or keep memory, when its access has been taken away; 2 s
}

// Defaults of Limits.
const (
	DefaultSessions = 4096
	DefaultLanes    = 16384
)

// Numbers of lanes from ProgramLane on are of storage nodes' own programs, such as the
// reconcile of a failover: a node that is full of clients has room for those.
const (
	ProgramLane     = 1 << 31
	programSessions = 64
	programLanes    = 1024

	// WatchLane and the number behind it are of the connections over which a session watches words: they do not count
	// towards the lanes that its ticket allows.
	WatchLane = 1 << 30
	// WatchLanes is how many of them there are.
	WatchLanes = 2
	// CallLane and the numbers behind it are of the connections over which a worker takes calls: CallLanes of them, which
	// do not count either.
	CallLane  = WatchLane + WatchLanes
	CallLanes = 16
	endOfHeld = CallLane + CallLanes
)

// Room says whether a lane with that number may be admitted where there are so many sessions and
// lanes.
func (l *Limits) Room(sessions, lanes int, number uint32) bool {
	if number >= ProgramLane {
		sessions, lanes = sessions-programSessions, lanes-programLanes
	}
	return sessions < l.Sessions && lanes < l.Lanes
}

// withDefaults replaces zero limits by the defaults.
func (l Limits) withDefaults() Limits {
	if l.Sessions == 0 {
		l.Sessions = DefaultSessions
	}
	if l.Lanes == 0 {
		l.Lanes = DefaultLanes
	}
	if l.LanesPerSession == 0 {
		l.LanesPerSession = 256
	}
	if l.Mailboxes == 0 {
		l.Mailboxes = 1024
	}
	if l.Watches == 0 {
		l.Watches = 1 << 18
	}
	if l.Offences == 0 {
		l.Offences = 1000
	}
	if l.KillAfter == 0 {
		l.KillAfter = 2 * time.Second
	}
	return l
}

// Access decides which sessions may access the regions of one node, and revokes access.
type Access struct {
	Verifier
	limits   Limits   // after New never changed, without zeros
	counters counters // atomics, read without mu

	relay  Relay                     // nil: CPUs execute; set before anything is served
	left   func(serial uint64)       // may be nil; set before anything is served
	onKill func(pid int, why string) // may be nil; set before anything is served
	// procedures by number, that clients call by messages; set before anything is served
	procedures map[uint16]Procedure
	watches    watches // words that clients watch; with a lock of its own

	mu        sync.Mutex             // guards what follows, and the slots of all lanes; never held while a chain is awaited
	regions   map[uint32]*region     // every region that was ever served or closed here: epochs must not fall
	sessions  map[uint64]*session    // by serial
	mailboxes map[mailboxID]*mailbox // until their session ends, or others need the room
	holdings  map[uint64]*holding    // by serial, until the session has ended and its processes hold nothing
	ended     Ended
	closed    bool  // Close has begun: nothing is admitted or served any more
	withdrawn bool  // Withdraw has begun: no session entitles a process to memory any more
	lanes     int   // of all sessions
	past      Usage // of lanes that have left
}

// region is what an Access knows of one region, also while it is not served.
type region struct {
	number uint32        // in the table; constant
	change chan struct{} // held by the one change under way

	// Guarded by Access.mu. Invariant: epoch and closed never fall.
	epoch  uint64   // served last
	closed uint64   // newest epoch that has been closed
	secret [32]byte // of windowKey; drawn anew for each epoch, never sent
	tenant uint32   // of memory, as Memory.Own named it when the epoch was opened
	memory *Memory  // nil while not served
	held   *Memory  // whose mapping lanes may still touch
}

// session is a session that has lanes here, or that has left with offences. Guarded by Access.mu.
type session struct {
	ticket rdma.Ticket      // of the lane that came first
	lanes  map[uint32]*Lane // by number
	past   Usage            // of lanes that have left; its Offences count towards Limits.Offences
	since  time.Time        // when its first lane came
}

// New makes the access control of one incarnation of a node. Tickets are those signed with
// a key of the ring, which may change.
func New(cluster [16]byte, keys *keyring.Ring, node uint32, incarnation uint64, limits Limits) *Access {
	a := &Access{
		Verifier:   Verifier{Cluster: cluster, Keys: keys, Node: node, Incarnation: incarnation},
		limits:     limits.withDefaults(),
		counters:   counters{refusals: make([]atomic.Uint64, len(rdma.Refusals))},
		regions:    make(map[uint32]*region),
		sessions:   make(map[uint64]*session),
		holdings:   make(map[uint64]*holding),
		mailboxes:  make(map[mailboxID]*mailbox),
		procedures: map[uint16]Procedure{msg.Echo: echo},
	}
	a.watches.init()
	a.procedures[msg.Watch] = a.watch
	return a
}

// OnLeft sets a function that is called when the last lane of a session has ended and this node
// has not ended it: the client has closed its connections, or died. f must not block.
// Preconditions: nothing is served yet.
func (a *Access) OnLeft(f func(serial uint64)) { a.left = f }

// OnKill sets a function that is called when a process is killed because it keeps memory of a
// session that has ended, or stays inside a chain. f must not block.
// Preconditions: nothing is served yet.
func (a *Access) OnKill(f func(pid int, why string)) { a.onKill = f }

// Peer is the number and the incarnation of the node, which clients compare with the table.
func (a *Access) Peer() (node uint32, incarnation uint64) { return a.Node, a.Incarnation }

// lock keeps all others from changing access to a region, until ctx ends at most.
func (a *Access) lock(ctx context.Context, number uint32) (*region, error) {
	a.mu.Lock()
	r := a.regions[number]
	if r == nil {
		r = &region{number: number, change: make(chan struct{}, 1)}
		a.regions[number] = r
	}
	a.mu.Unlock()
	select {
	case r.change <- struct{}{}:
		return r, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("region %d: another change of access is under way: %w", number, ctx.Err())
	}
}

// OpenRegion serves memory under an epoch, with keys that were never used before. nil: no verb
// under an older key runs any more. If the epoch is being served already nothing changes. After
// an error it is uncertain what is served: call again.
func (a *Access) OpenRegion(ctx context.Context, number uint32, epoch uint64, m *Memory) error {
	if err := m.retain(); err != nil {
		return err
	}
	kept, err := a.open(ctx, number, epoch, m)
	if !kept {
		err = errors.Join(err, m.release())
	}
	return err
}

// open is OpenRegion. kept says that the hold on m now belongs to the region.
func (a *Access) open(ctx context.Context, number uint32, epoch uint64, m *Memory) (kept bool, err error) {
	if err := a.checkDomain(number, m); err != nil {
		return false, err
	}
	r, err := a.lock(ctx, number)
	if err != nil {
		return false, err
	}
	defer func() { <-r.change }()
	a.mu.Lock()
	if r.memory == m && r.epoch == epoch {
		a.mu.Unlock()
		return false, nil
	}
	if epoch <= r.closed || r.memory != nil && epoch <= r.epoch {
		defer a.mu.Unlock()
		return false, fmt.Errorf("region %d: opening epoch %d: %w (served %d, closed %d)", number, epoch, ErrEpoch, r.epoch, r.closed)
	}
	r.closed = max(r.closed, epoch-1)
	a.mu.Unlock()
	if err := a.cut(ctx, r); err != nil {
		return false, err
	}
	var secret [32]byte
	rand.Read(secret[:])
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false, fmt.Errorf("region %d: the node stops", number)
	}
	r.memory, r.held, r.epoch, r.secret, r.tenant = m, m, epoch, secret, m.Tenant()
	return true, nil
}

// CloseRegion stops serving a region under epochs up to this one. nil: no verb under a key of
// these epochs runs any more, and OpenRegion refuses them. Procedures may run on: what they do in the region, they do by
// verbs, or under Access.mu. A region that is served under a later
// epoch stays open.
func (a *Access) CloseRegion(ctx context.Context, number uint32, epoch uint64) error {
	r, err := a.lock(ctx, number)
	if err != nil {
		return err
	}
	defer func() { <-r.change }()
	a.mu.Lock()
	r.closed = max(r.closed, epoch)
	stays := r.memory != nil && r.epoch > epoch
	a.mu.Unlock()
	if stays {
		return nil
	}
	return a.cut(ctx, r)
}

// Serves says whether a region is served under any epoch.
func (a *Access) Serves(number uint32) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.regions[number]
	return r != nil && r.memory != nil
}

// evict forgets a session without lanes, which was remembered for its offences only.
func (a *Access) evict() bool {
	for serial, s := range a.sessions {
		if len(s.lanes) == 0 {
			delete(a.sessions, serial)
			return true
		}
	}
	return false
}

// cut ends all access to a region and gives its memory back.
// Preconditions: the caller holds r.change.
func (a *Access) cut(ctx context.Context, r *region) error {
	a.mu.Lock()
	r.memory = nil
	var lanes []*Lane
	for _, s := range a.sessions {
		for _, l := range s.lanes {
			if slot, ok := l.slots[r.number]; ok {
				atomic.StoreUint64(&l.page.keys[slot], 0) // a, see doc.go
				lanes = append(lanes, l)
			}
		}
	}
	held := r.held
	a.mu.Unlock()
	a.watches.cut(r.number)
	a.counters.rotations.Add(1)
	if err := drainChains(ctx, lanes, a.limits.KillAfter); err != nil {
		return fmt.Errorf("region %d: %w", r.number, err)
	}
	a.mu.Lock()
	r.held = nil
	a.mu.Unlock()
	if held != nil {
		return held.release()
	}
	return nil
}

// Fence ends sessions. nil: no verb of theirs changes a byte on this node, no process that got
// memory for them can write it, and none of them will be admitted again. After an error call
// again.
func (a *Access) Fence(ctx context.Context, serials ...uint64) error {
	a.mu.Lock()
	for _, serial := range serials {
		a.ended.Fence(serial)
	}
	a.mu.Unlock()
	return a.end(ctx, serials)
}

// EndBelow ends every session with a serial below next that is not in live, as
// Fence does; later it admits only those of live below next.
func (a *Access) EndBelow(ctx context.Context, next uint64, live []uint64) error {
	a.mu.Lock()
	a.ended.EndBelow(next, live)
	var gone []uint64
	for serial := range a.sessions {
		if !a.ended.Admits(serial) {
			gone = append(gone, serial)
		}
	}
	for serial := range a.holdings { // also of sessions that have left
		if a.sessions[serial] == nil && !a.ended.Admits(serial) {
			gone = append(gone, serial)
		}
	}
	for id := range a.mailboxes {
		if a.sessions[id.serial] == nil && a.holdings[id.serial] == nil && !a.ended.Admits(id.serial) {
			gone = append(gone, id.serial)
		}
	}
	a.mu.Unlock()
	return a.end(ctx, gone)
}

// end revokes sessions. nil: nothing of theirs executes, or can.
func (a *Access) end(ctx context.Context, serials []uint64) error {
	a.mu.Lock()
	var lanes []*Lane
	for serial, s := range a.sessions {
		if slices.Contains(serials, serial) {
			a.counters.fences.Add(1)
			for _, l := range s.lanes {
				l.shutGate(revoked)
				lanes = append(lanes, l)
			}
		}
	}
	a.mu.Unlock()
	if err := a.finish(ctx, lanes); err != nil {
		return err
	}
	a.watches.end(func(serial uint64) bool { return slices.Contains(serials, serial) })
	if err := a.dropMailboxes(func(id mailboxID) bool { return slices.Contains(serials, id.serial) }); err != nil {
		return err
	}
	return a.dispossess(ctx, serials)
}

// finish waits for lanes whose gates are shut, and removes them.
func (a *Access) finish(ctx context.Context, lanes []*Lane) error {
	for _, l := range lanes {
		l.stop()
	}
	if err := drain(ctx, lanes, a.limits.KillAfter); err != nil {
		return err
	}
	for _, l := range lanes {
		a.remove(l)
	}
	return nil
}

// Close ends all sessions and closes all regions. Memory that shm clients still have mapped
// belongs to no region any more: memory without a file ends with its last mapping, and a file
// stays locked until then.
func (a *Access) Close(ctx context.Context) error {
	serials, err := a.close(ctx)
	if err != nil {
		return err
	}
	a.forget(serials)
	return nil
}

// Withdraw is Close that takes the memory from the processes which were sent it, as Fence does. nil: none of them can write it. The sessions do
// not count as ended. After an error call again.
func (a *Access) Withdraw(ctx context.Context) error {
	serials, err := a.close(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.withdrawn = true
	a.mu.Unlock()
	return a.dispossess(ctx, serials)
}

// close ends all lanes and closes all regions. It returns the sessions whose processes may hold memory still.
func (a *Access) close(ctx context.Context) (serials []uint64, err error) {
	a.mu.Lock()
	a.closed = true
	var lanes []*Lane
	for _, s := range a.sessions {
		for _, l := range s.lanes {
			l.shutGate(gone)
			lanes = append(lanes, l)
		}
	}
	var regions []uint32
	for number := range a.regions {
		regions = append(regions, number)
	}
	a.mu.Unlock()
	if err := a.finish(ctx, lanes); err != nil {
		return nil, err
	}
	for _, number := range regions {
		r, err := a.lock(ctx, number)
		if err != nil {
			return nil, err
		}
		err = a.cut(ctx, r)
		<-r.change
		if err != nil {
			return nil, err
		}
	}
	a.watches.end(func(uint64) bool { return true })
	if err := a.dropMailboxes(func(mailboxID) bool { return true }); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Keys(a.holdings)), nil
}

// windowKey is a session's key of a region under its present epoch. Sessions have
// different ones; lanes of a session have the same, so that a window outlives the
// connection it was opened on.
func (r *region) windowKey(serial uint64) uint64 {
	h := hmac.New(sha256.New, r.secret[:])
	var b [16]byte
	for {
		binary.LittleEndian.PutUint64(b[:], serial)
		h.Write(b[:])
		if key := binary.LittleEndian.Uint64(h.Sum(nil)); key != 0 {
			return key
		}
	}
}

// Domain is the one that this node's regions belong to.
func (a *Access) Domain() proto.Domain {
	if a.relay != nil {
		return proto.DomainAdapter
	}
	return proto.DomainCPU
}

// checkDomain refuses memory of the other domain: an atomic of a CPU is not atomic with regard to
// one of an adapter.
func (a *Access) checkDomain(number uint32, m *Memory) error {
	h, err := proto.DecodeRegionHeader(m.mem[:min(len(m.mem), proto.RegionHeaderBytes)])
	if err == nil && h.Domain != a.Domain() {
		return fmt.Errorf("region %d: its atomics belong to the domain %q, this node serves %q: %w",
			number, h.Domain, a.Domain(), rdma.ErrDomain)
	}
	return nil
}
