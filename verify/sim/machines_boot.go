package sim

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/keyring"
	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	nodestate "github.com/quarrystore/quarry/storagenode/state"
)

// boot is the state of etcd and the agents at the beginning of a schedule: a cluster that was
// set up without faults.
type boot struct {
	etcd              etcd                      // every record
	agents            [maxNodes]nodestate.State // the state of each agent's machine
	far               table                     // row of the far region
	record, farRecord *quarrypb.Region          // as etcd has them
}

// bootKey says how a cluster is set up: schedules with the same key begin with the same cluster.
type bootKey struct {
	replicas, nodes int  // of the clients' region
	durable         bool // both regions
	far             int  // replicas of the far region; 0: there is none
	adapters        bool // nodes have several adapters
}

// leaseNs is the lease of the machines' configuration. The lease of a schedule says how much
// virtual time that is.
const leaseNs = int64(3e9)

func (m *machines) config() state.Config {
	every := time.Duration(0)
	if m.w.opt.Grow {
		every = 500 * time.Millisecond
	}
	return state.Config{ReclaimEvery: every, Lease: time.Duration(leaseNs), NodeHeartbeat: time.Duration(leaseNs / 3), RegionBytes: m.w.geo.RegionBytes, Version: "sim",
		ReplaceAfter: 4 * time.Second, ScrubEvery: time.Second, SessionIDs: uint32(m.w.d.ids), Sign: unsigned}
}

// unsigned leaves a ticket without a signature: the simulated nodes verify none. The tests of
// controller and of controller/state verify signatures.
func unsigned(t *rdma.Ticket, s *keyring.Signer) { t.KeyID = s.ID() }

// boot sets up a cluster of the schedule's shape. It does so once for each shape.
func (m *machines) boot() *boot {
	key := bootKey{m.w.d.replicas, m.w.d.nodes, m.w.opt.Durable, m.drawFar(), m.w.opt.Adapters}
	b := m.boots[key]
	if b == nil {
		b = m.setUp(key)
		m.boots[key] = b
	}
	return b
}

// setUp has a real controller register real agents and create the region, without messages in
// between.
func (m *machines) setUp(key bootKey) *boot {
	b := &boot{etcd: newEtcd()}
	term, _ := b.etcd.campaign(0, 0, never)
	mach, acts, err := state.New(m.config(), term, 0, nil, clusterBytes[:])
	if err != nil {
		panic(err)
	}
	answers := map[uint64]state.Answer{}
	var play func(acts []state.Action)
	step := func(e state.Event) { play(mach.Step(0, e)) }
	play = func(acts []state.Action) {
		for _, a := range acts {
			switch a := a.(type) {
			case state.Commit:
				rev, err := b.etcd.txn(term, a.Ops, 0)
				if err != nil {
					panic(err)
				}
				step(state.Committed{Revision: rev})
			case state.Call:
				ev, _ := commandOf(a.Msg)
				st := &b.agents[a.Node-1]
				todo, err := st.Step(ev)
				if err != nil {
					panic(fmt.Sprintf("%T: %v", a.Msg, err))
				}
				if i := slices.IndexFunc(todo, func(a nodestate.Action) bool { return a.Region != 0 }); i >= 0 {
					_, _ = st.Step(nodestate.Ended{Region: todo[i].Region})
				}
				step(state.Reply{Call: a.ID, Msg: emptyAnswer(a.Msg)})
			case state.Answer:
				answers[a.Waiter] = a
			}
		}
	}
	play(acts)
	step(state.Lead{Until: never})
	regions := byte(0)
	ask := func(waiter uint64, msg any) any {
		if _, creates := msg.(*quarrypb.CreateRegionRequest); creates {
			regions++
		}
		step(state.Ask{Waiter: waiter, Msg: msg, Random: append([]byte{regions}, make([]byte, 16*state.MaxCount)...)})
		if a := answers[waiter]; a.Err != nil || a.Msg == nil {
			panic(fmt.Sprintf("%T: %v", msg, a.Err))
		}
		return answers[waiter].Msg
	}
	b.register(key, ask)
	b.create(m, key, ask)
	b.etcd.resign(term, 0)
	return b
}

// register registers the agents.
func (b *boot) register(key bootKey, ask func(waiter uint64, msg any) any) {
	for i := range key.nodes {
		b.agents[i] = *nodestate.New(nodeLimits(key.adapters), nodestate.Kept{}, nil)
		r := ask(uint64(i+1), &quarrypb.RegisterNodeRequest{Node: nodeRecord(i, 1, 0, key.adapters), Secret: secret[:]}).(*quarrypb.RegisterNodeResponse)
		if _, err := b.agents[i].Step(registered(r)); err != nil {
			panic(err)
		}
	}
}

// create creates the regions.
func (b *boot) create(m *machines, key bootKey, ask func(waiter uint64, msg any) any) {
	durability := quarrypb.Durability_DURABILITY_MEM
	if key.durable {
		durability = quarrypb.Durability_DURABILITY_PMEM
	}
	made := ask(100, &quarrypb.CreateRegionRequest{Replicas: uint32(key.replicas), Count: 1, SizeBytes: m.w.geo.RegionBytes, Durability: durability})
	b.record = made.(*quarrypb.CreateRegionResponse).Regions[0]
	for i, r := range b.record.Replicas {
		if int(r.Node) != i+1 {
			panic(fmt.Sprintf("replica %d is on node %d; the schedules begin with it on %d", i, r.Node, i+1))
		}
	}
	if key.far > 0 {
		made := ask(101, &quarrypb.CreateRegionRequest{Replicas: uint32(key.far), Count: 1, SizeBytes: m.w.geo.RegionBytes})
		b.farRecord = made.(*quarrypb.CreateRegionResponse).Regions[0]
		b.far = rowOf(b.farRecord)
	}
}

// clusterBytes are the cluster's uuid and keys.
var clusterBytes = [state.RandomBytes]byte{0: 0xc1, 16: 0x7e, 48: 0x9d}

// publicKey is that of every node and session, and secret that of every registration: the
// simulated fabric needs no proofs.
var publicKey, secret = keyring.NewSigner([keyring.SeedBytes]byte{1}).Public(), [32]byte{2}

// nodeLimits are those of every node. several: it has several adapters.
func nodeLimits(several bool) nodestate.Limits {
	l := nodestate.Limits{CapacityBytes: 1 << 40, Persistent: true}
	if several {
		l.Adapters = adapters
	}
	return l
}

func nodeName(i int) string { return fmt.Sprintf("n%d", i+1) }

// nodeRecord is the record with which node i registers.
func nodeRecord(i int, incarnation uint64, number uint32, several bool) *quarrypb.Node {
	name := nodeName(i)
	n := &quarrypb.Node{
		Name: name, Id: number, Incarnation: incarnation, FailureDomain: fmt.Sprintf("/dc/r%d/h", i+1), AgentUrl: "http://" + name + ":1",
		CapacityBytes: nodeLimits(several).CapacityBytes, Persistent: true, Domain: 1, Key: publicKey[:], Fabric: wire.FabricVersion,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: name + ":2"}},
	}
	for a := range nodeLimits(several).Adapters {
		n.Endpoints = append(n.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_VERBS_ADAPTER, Address: fmt.Sprintf("%s:%d", name, 3+a), Adapter: uint32(a)})
	}
	return n
}

func registered(r *quarrypb.RegisterNodeResponse) nodestate.Registered {
	return nodestate.Registered{Term: r.ControllerTerm, Cluster: [16]byte(r.Cluster), Node: r.Id, Next: r.NextSerial, Live: r.LiveSerials, Fenced: r.FencedSerials}
}

// commandOf converts the call of a controller into the agent's event, as its service does.
func commandOf(msg proto.Message) (ev nodestate.Event, ok bool) {
	switch r := msg.(type) {
	case *quarrypb.HostRegionRequest:
		return nodestate.Host{
			Term: r.ControllerTerm, Region: r.Region, UUID: [16]byte(r.Uuid), Cluster: [16]byte(r.Cluster), Bytes: r.SizeBytes,
			Persistent: r.Durability == quarrypb.Durability_DURABILITY_PMEM, Zero: r.Zero, MustExist: r.MustExist, Epoch: r.Epoch,
		}, true
	case *quarrypb.OpenRegionRequest:
		return nodestate.Open{Term: r.ControllerTerm, Region: r.Region, Epoch: r.Epoch, Adapter: r.Adapter}, true
	case *quarrypb.CloseRegionRequest:
		return nodestate.Close{Term: r.ControllerTerm, Region: r.Region, Epoch: r.Epoch}, true
	case *quarrypb.DropRegionRequest:
		return nodestate.Drop{Term: r.ControllerTerm, Region: r.Region, Epoch: r.Epoch}, true
	case *quarrypb.FenceRequest:
		return nodestate.Fence{Term: r.ControllerTerm, Serials: r.Serials}, true
	}
	return nil, false
}

func emptyAnswer(msg proto.Message) proto.Message {
	switch msg.(type) {
	case *quarrypb.HostRegionRequest:
		return &quarrypb.HostRegionResponse{}
	case *quarrypb.OpenRegionRequest:
		return &quarrypb.OpenRegionResponse{}
	case *quarrypb.CloseRegionRequest:
		return &quarrypb.CloseRegionResponse{}
	case *quarrypb.DropRegionRequest:
		return &quarrypb.DropRegionResponse{}
	case *quarrypb.FenceRequest:
		return &quarrypb.FenceResponse{}
	}
	return nil
}
