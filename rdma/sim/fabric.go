package sim

import (
	"fmt"
	"math/bits"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// MaxConns bounds the open connections of a fabric: the ready ones are the bits of a word.
const MaxConns = 64

// MaxSession bounds the session ids that a fabric can fence.
const MaxSession = 4096

// Agent is the session of the nodes' own programs: it is not fenced, and it
// reaches memory that is closed.
const Agent = 0

// Watcher sees what verbs did, in the order in which they did it.
type Watcher interface {
	// Swapped: a CAS or FETCH_ADD changed the word at off.
	Swapped(m *Memory, session uint32, off, old, new uint64)
	// Wrote: a piece of a WRITE has been stored.
	Wrote(m *Memory, session uint32, off, n uint64)
	// Ran: a verb of the session is about to run.
	Ran(m *Memory, session uint32)
}

// Fabric is nodes and connections.
type Fabric struct {
	// Choose draws a number in [0,n). 0 is the tamest choice.
	Choose func(n int) int
	// Grain is the number of bytes that a READ or WRITE moves at once: 64, or 8 to be cruel.
	Grain int
	// InOrder sets the fence flag where a chain lacks it, as the verbs provider does.
	InOrder bool
	// Flaky breaks a connection at one step in so many; 0: never.
	Flaky int
	// Halt, set by the watcher while a verb is about to run, ends the move behind it.
	Halt bool
	// Watch, if set, is called for each change.
	Watch Watcher
	// Answered, if set, is called when a chain has got its outcome.
	Answered func(c *Conn)
	// Cut, if set, says that no message passes between session and node.
	Cut func(session uint32, node *Node) bool
	// Yield, if set, lets others run while a connection waits.
	Yield func()
	// CrossDomain opens regions through another atomicity domain, which must not be done.
	CrossDomain bool

	nodes []*Node         // by id, counted from 1
	conns [MaxConns]*Conn // open connections by index; nil: the index is free
	ready uint64          // bit of each connection that Step can move; kept by Conn.mark
	// stalled connections stand still.
	stalled uint64     // bit of each connection that Stall has stopped
	keys    uint64     // state of the generator of region keys
	spare   []*pending // pending chains to use again
}

// Node hosts memory.
type Node struct {
	ID          uint32                  // counted from 1
	Incarnation uint64                  // rises with Start; connections to an earlier one are broken
	Up          bool                    // answers; false after Crash
	fabric      *Fabric                 // that it belongs to
	mems        []*Memory               // its copies of regions, in the order of AddMemory
	revoked     [MaxSession / 64]uint64 // bit of each fenced session
	lost        uint64                  // bit of each adapter that has failed in this incarnation; see adapter.go
}

// New makes an empty fabric.
func New(choose func(n int) int) *Fabric { return &Fabric{Choose: choose, Grain: 64} }

// Reset drops connections and nodes' state, keeping storage: the nodes stay.
func (f *Fabric) Reset() {
	for i, c := range f.conns {
		if c != nil {
			c.drop()
			f.conns[i] = nil
		}
	}
	f.ready, f.stalled = 0, 0
	for _, n := range f.nodes {
		n.Up, n.Incarnation, n.revoked, n.lost = true, 1, [MaxSession / 64]uint64{}, 0
		for _, m := range n.mems {
			m.Zero()
			m.Epoch, m.key, m.adapter, m.shared = 0, 0, 0, false
		}
	}
}

// AddNode adds a node that is up.
func (f *Fabric) AddNode() *Node {
	n := &Node{ID: uint32(len(f.nodes) + 1), Incarnation: 1, Up: true, fabric: f}
	f.nodes = append(f.nodes, n)
	return n
}

// Nodes lists the nodes; their ids are their places, counted from 1.
func (f *Fabric) Nodes() []*Node { return f.nodes }

// AddMemory makes a closed, zeroed copy of a region.
func (n *Node) AddMemory(region uint32, bytes uint64, p Profile) *Memory {
	method := rdma.Native
	if p == DRAM {
		method = rdma.NoFlush
	}
	m := &Memory{Node: n, Region: region, Profile: p, Method: method, Domain: proto.DomainCPU, bytes: bytes, pages: make([]*page, bytes/pageBytes)}
	n.mems = append(n.mems, m)
	return m
}

// Memory is the node's copy of a region, nil if there is none.
func (n *Node) Memory(region uint32) *Memory {
	for _, m := range n.mems {
		if m.Region == region {
			return m
		}
	}
	return nil
}

// Open gives access under an epoch, with a new key.
func (m *Memory) Open(epoch uint64) {
	m.Node.fabric.keys += 0x9e3779b97f4a7c15
	m.Epoch, m.key = epoch, mix(m.Node.fabric.keys^m.Node.Incarnation<<32^uint64(m.Node.ID))|1
}

// keyOf is the key of a session's windows.
func (m *Memory) keyOf(session uint32) uint64 { return mix(m.key^uint64(session)<<1) | 1 }

// mix is splitmix64's finalizer: it spreads the bits of a seed.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Close ends access: verbs under the old key never run again.
func (m *Memory) Close() { m.key, m.shared = 0, false }

// IsOpen says whether clients have access.
func (m *Memory) IsOpen() bool { return m.key != 0 }

// Revoke fences a session at this node: no verb of it runs any more.
func (n *Node) Revoke(session uint32) { n.revoked[session/64] |= 1 << (session % 64) }

// Forgive forgets the fence of a session whose id is free again.
func (n *Node) Forgive(session uint32) { n.revoked[session/64] &^= 1 << (session % 64) }

// Revoked says whether a session is fenced here.
func (n *Node) Revoked(session uint32) bool { return n.revoked[session/64]>>(session%64)&1 != 0 }

// Crash stops the node; with it every connection and everything posted on them.
func (n *Node) Crash() {
	n.Up = false
	for _, m := range n.mems {
		m.Close()
	}
	for _, c := range n.fabric.conns {
		if c != nil && c.node == n {
			c.Break()
			c.drop()
		}
	}
}

// Start brings a stopped node up in a new incarnation. It remembers no fences: those of
// its connections died with them.
func (n *Node) Start() { n.Up, n.Incarnation, n.lost = true, n.Incarnation+1, 0 }

// Ready is the set of connections that Step can move.
func (f *Fabric) Ready() uint64 { return f.ready &^ f.stalled }

// Conn is connection number i, nil if it is closed.
func (f *Fabric) Conn(i int) *Conn { return f.conns[i] }

// Dial connects a session to a node.
func (f *Fabric) Dial(session uint32, n *Node) (*Conn, error) {
	if !n.Up || f.cut(session, n) {
		return nil, fmt.Errorf("%w: node %d does not answer", rdma.ErrBroken, n.ID)
	}
	if session != Agent && n.Revoked(session) {
		return nil, rdma.ErrRevoked
	}
	for i := range f.conns {
		if f.conns[i] == nil {
			c := &Conn{fabric: f, node: n, incarnation: n.Incarnation, session: session, index: i, domain: proto.DomainCPU}
			f.conns[i] = c
			return c, nil
		}
	}
	return nil, fmt.Errorf("%w: the simulated fabric has %d connections", rdma.ErrLimit, MaxConns)
}

// cut says whether the schedule has cut a session off from a node.
func (f *Fabric) cut(session uint32, n *Node) bool { return f.Cut != nil && f.Cut(session, n) }

// StepAny moves one connection, by choice; false if there is nothing to do.
func (f *Fabric) StepAny() bool {
	w := f.Ready()
	n := bits.OnesCount64(w)
	if n == 0 {
		return false
	}
	for range f.Choose(n) {
		w &= w - 1
	}
	f.conns[bits.TrailingZeros64(w)].Step()
	return true
}
