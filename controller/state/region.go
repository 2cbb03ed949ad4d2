package state

import (
	"slices"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// region is a region's record, and the work on it.
type region struct {
	rec *quarrypb.Region // as staged
	pub *quarrypb.Region // as committed; nil while it is not in the table
	rev uint64           // of pub
	job *job

	changing  bool  // a new epoch is on its way into the table
	lacking   bool  // it has not the replicas that it should have
	opened    int64 // when it was opened last by this leader
	short     int64 // since when it has lacked something
	next      int64 // improve does not look before
	joining   *node // whose memory is being made for it
	fresh     fresh
	copier    *task
	scrubbing bool
	progress  *quarrypb.WorkResponse // of a reconcile
}

// fresh is a joiner whose memory was zeroed before an epoch, and was not open since.
type fresh struct {
	node  uint32
	epoch uint64
}

// published says whether a record belongs into the table.
func published(rec *quarrypb.Region) bool {
	return rec.State != quarrypb.RegionState_REGION_STATE_CREATING
}

// on is the region's replica on a node, or nil.
func (g *region) on(node uint32) *quarrypb.Replica {
	for _, r := range g.rec.Replicas {
		if r.Node == node {
			return r
		}
	}
	return nil
}

// account adds a region's replicas to their nodes, or takes them away.
func (m *Machine) account(rec *quarrypb.Region, sign int) {
	for i, r := range rec.Replicas {
		n := m.node(r.Node)
		if n == nil {
			continue
		}
		if i == 0 {
			n.primary += sign
		}
		n.assigned += uint64(sign) * rec.SizeBytes
		if r.State != quarrypb.ReplicaState_REPLICA_STATE_OUT {
			n.hosts += sign
		}
	}
}

// regionChange is the change to a new record of a region, which the machine uses
// at once; then runs when it is committed.
func (m *Machine) regionChange(g *region, rec *quarrypb.Region, then func(rev uint64)) change {
	if g.rec != nil {
		m.account(g.rec, -1)
	}
	m.account(rec, +1)
	if g.rec != nil && g.rec.Epoch != rec.Epoch {
		m.endTasks(g)
	}
	g.rec = rec
	m.look(g)
	m.fencesDirty = true // a node may have stopped hosting
	return change{regionKey(rec.Id), rec, func(rev uint64) {
		if published(rec) {
			g.pub, g.rev = rec, rev
			m.log.add(rev, rec.Id, false)
		}
		if then != nil {
			then(rev)
		}
	}}
}

func (m *Machine) createRegion(waiter uint64, r *quarrypb.CreateRegionRequest, random []byte) {
	r = proto.CloneOf(r)
	if r.Count == 0 {
		r.Count = 1
	}
	if r.SizeBytes == 0 {
		r.SizeBytes = m.cfg.RegionBytes
	}
	if r.Durability == 0 {
		r.Durability = quarrypb.Durability_DURABILITY_MEM
	}
	if err := m.checkCreate(r, random); err != nil {
		m.fail(waiter, err)
		return
	}
	if r.UnlessNewerThan != nil && m.joinCreation(waiter, r) {
		return
	}
	taken := make([]uint64, len(m.nodes))
	primaries := m.primaries()
	sets := make([][]*node, r.Count)
	for i := range sets {
		set, err := m.place(r, taken)
		if err != nil {
			if err.Code == Exhausted {
				m.short()
			}
			m.fail(waiter, err)
			return
		}
		for _, n := range set {
			taken[n.at] += r.SizeBytes
		}
		m.fewestFirst(set, primaries)
		sets[i] = set
	}
	c := m.editCluster()
	changes := []change{}
	var made []*region
	for i, set := range sets {
		rec := &quarrypb.Region{
			Id: c.NextRegion, Uuid: slices.Clone(random[16*i : 16*i+16]), SizeBytes: r.SizeBytes, Epoch: 1,
			State: quarrypb.RegionState_REGION_STATE_CREATING, Durability: r.Durability, WantReplicas: r.Replicas,
		}
		c.NextRegion++
		for _, n := range set {
			rec.Replicas = append(rec.Replicas, &quarrypb.Replica{
				Node: n.rec.Id, Incarnation: n.rec.Incarnation, State: quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC,
			})
		}
		g := &region{}
		changes = append(changes, m.regionChange(g, rec, nil))
		m.regions = append(m.regions, g) // numbers rise
		made = append(made, g)
	}
	m.stage(append(changes, m.clusterChange(c))...)

	j := m.newJob(made)
	j.waiters = []uint64{waiter}
	j.give = true
	j.fail = func(err *Error) {
		m.note("%d regions could not be made: %v", len(made), err)
		for _, w := range j.waiters {
			m.fail(w, err)
		}
		m.undo(made)
	}
	j.step(m.legs(made, m.host(false)), func() {
		// Nodes that hosted nothing were told of fences, but nobody waited for them.
		j.gate = func() bool { return m.owesNothing(made) }
		j.step(m.legs(made, m.openAt(1)), func() { m.publish(j, made) })
	})
}

// publish ends a creation: the regions enter the table.
func (m *Machine) publish(j *job, made []*region) {
	changes := []change{}
	resp := &quarrypb.CreateRegionResponse{}
	for _, g := range made {
		rec := proto.CloneOf(g.rec)
		rec.State = quarrypb.RegionState_REGION_STATE_OPEN
		changes = append(changes, m.regionChange(g, rec, nil))
		resp.Regions = append(resp.Regions, rec)
		m.note("region %d is open with %d replicas of %s", rec.Id, len(rec.Replicas), bytesText(rec.SizeBytes))
	}
	m.stage(changes...)
	j.end()
	for _, w := range j.waiters {
		m.answer(w, resp)
	}
}

func (m *Machine) checkCreate(r *quarrypb.CreateRegionRequest, random []byte) *Error {
	if r.Replicas < 1 || r.Replicas > MaxReplicas {
		return errorf(Invalid, "%d replicas: want 1 to %d", r.Replicas, MaxReplicas)
	}
	if r.Count > MaxCount {
		return errorf(Invalid, "%d regions in one request: want at most %d", r.Count, MaxCount)
	}
	if _, err := wire.NewGeometry(r.SizeBytes); err != nil {
		return errorf(Invalid, "%v", err)
	}
	if r.Durability > quarrypb.Durability_DURABILITY_PMEM || r.Durability < 0 {
		return errorf(Invalid, "durability %d: want mem or pmem", r.Durability)
	}
	if len(m.regions)+int(r.Count) > MaxRegions {
		return errorf(Exhausted, "the cluster has %d regions, the most there can be are %d", len(m.regions), MaxRegions)
	}
	if len(random) < 16*int(r.Count) {
		return errorf(Internal, "%d random bytes for %d regions", len(random), r.Count)
	}
	return nil
}

// joinCreation answers a request by newer regions of the same kind that others have
// asked for, made or in the making.
func (m *Machine) joinCreation(waiter uint64, r *quarrypb.CreateRegionRequest) bool {
	resp := &quarrypb.CreateRegionResponse{}
	var making *job
	for _, g := range m.regions {
		if g.rec.Id <= *r.UnlessNewerThan || g.rec.WantReplicas != r.Replicas || g.rec.Durability != r.Durability {
			continue
		}
		switch {
		case g.pub != nil && g.rec.State == quarrypb.RegionState_REGION_STATE_OPEN:
			resp.Regions = append(resp.Regions, g.pub)
		case g.job != nil && g.job.give && g.job.err == nil:
			making = g.job
		}
	}
	switch {
	case len(resp.Regions) > 0:
		m.answer(waiter, resp)
	case making != nil:
		making.waiters = append(making.waiters, waiter)
	default:
		return false
	}
	return true
}

// undo takes back regions that are not in the table: their memory first, so that a
// new leader finds the records of what is left to do.
func (m *Machine) undo(gone []*region) {
	j := m.newJob(gone)
	j.step(m.legs(gone, m.drop), func() {
		changes := []change{}
		for _, g := range gone {
			m.account(g.rec, -1)
			changes = append(changes, change{regionKey(g.rec.Id), nil, nil})
			m.regions = slices.DeleteFunc(m.regions, func(o *region) bool { return o == g })
		}
		m.stage(changes...)
		m.fencesDirty = true
		j.end()
	})
}

// legs are one call for each replica that takes part.
func (m *Machine) legs(regions []*region, call func(g *region, n *node) *leg) []*leg {
	var legs []*leg
	for _, g := range regions {
		for _, r := range g.rec.Replicas {
			n := m.node(r.Node)
			if n == nil || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN || r.State == out {
				continue
			}
			legs = append(legs, call(g, n))
		}
	}
	return legs
}

func (m *Machine) host(mustExist bool) func(g *region, n *node) *leg {
	return func(g *region, n *node) *leg {
		return &leg{n: n, timeout: hostTimeout, msg: &quarrypb.HostRegionRequest{
			Region: g.rec.Id, Uuid: g.rec.Uuid, Cluster: m.cluster.Uuid,
			SizeBytes: g.rec.SizeBytes, Durability: g.rec.Durability, MustExist: mustExist,
			ControllerTerm: m.term, Epoch: g.rec.Epoch,
		}}
	}
}

func (m *Machine) openAt(epoch uint64) func(g *region, n *node) *leg {
	return func(g *region, n *node) *leg {
		return &leg{n: n, timeout: callTimeout, msg: &quarrypb.OpenRegionRequest{Region: g.rec.Id, Epoch: epoch, ControllerTerm: m.term}}
	}
}

func (m *Machine) shut(g *region, n *node) *leg {
	return &leg{n: n, timeout: callTimeout, msg: &quarrypb.CloseRegionRequest{Region: g.rec.Id, Epoch: g.rec.Epoch - 1, ControllerTerm: m.term}}
}

func (m *Machine) drop(g *region, n *node) *leg {
	return &leg{n: n, timeout: callTimeout, msg: &quarrypb.DropRegionRequest{Region: g.rec.Id, ControllerTerm: m.term, Epoch: g.rec.Epoch}}
}

// owesNothing says whether the nodes that regions are on have acknowledged every fence.
func (m *Machine) owesNothing(regions []*region) bool {
	for _, g := range regions {
		for _, r := range g.rec.Replicas {
			if n := m.node(r.Node); n != nil && r.State != out && len(n.owed) > 0 {
				return false
			}
		}
	}
	return true
}
