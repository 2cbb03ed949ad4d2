package state

import (
	"slices"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// This file has regions: their records, their creation, and the calls that a job makes at their
// agents.

// region is a region's record, and the work on it. Times are in ns of the machine's clock.
type region struct {
	rec *quarrypb.Region // as staged
	pub *quarrypb.Region // as committed; nil while it is not in the table
	rev uint64           // of pub
	job *job             // creation or change of configuration under way; nil: none

	exposed   bool     // from a new configuration until each of its replicas has closed all earlier epochs; see expose
	changing  bool     // a new epoch is on its way into the table
	lacks     bool     // its replicas are not those that it should have: too few or too many, OUT, leaving
	synced    int64    // when a rebuilding replica came in sync last; its probes must be later
	opened    int64    // when it was opened last by this leader
	short     int64    // since when it has lacked something
	next      int64    // improve leaves the region alone before
	joining   *node    // whose memory is being made for it
	fresh     fresh    // a rebuilding replica that reconcile need not READ
	copier    *program // copies to rebuilding replicas; nil: none runs
	scrubbing bool     // a scrub runs here
	// failures is how often in a row a scrub or a reclaim has been given up here; none begins before
	// idle.
	failures int
	idle     int64
	progress *quarrypb.WorkResponse // of a reconcile
}

// fresh is a rebuilding replica whose memory was zeroed before an epoch, and was not open since.
type fresh struct {
	node  uint32 // that has it
	epoch uint64 // of the region, the first with this replica
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

// serves says whether clients may have keys of a region: it is in the table, or on its
// way there, and not lost.
func serves(rec *quarrypb.Region) bool {
	return published(rec) && rec.State != regionLost && rec.State != removed
}

// account adds a region to its tenant, and its replicas to their nodes, or takes them away.
func (m *Machine) account(rec *quarrypb.Region, sign int) {
	t := m.tenants.of(rec.Tenant)
	t.bytes += uint64(sign) * rec.SizeBytes * uint64(rec.WantReplicas)
	t.regions += sign
	for i, r := range rec.Replicas {
		n := m.node(r.Node)
		if n == nil {
			continue
		}
		if i == 0 {
			n.primary += sign
		}
		n.assigned += uint64(sign) * rec.SizeBytes
		if r.State != out {
			n.count(r, sign)
		}
		if r.State != out && serves(rec) {
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
		m.agents.endPrograms(g)
	}
	rec.Condition = condition(rec, m.reach(rec))
	g.rec = rec
	m.reconfig.updateLacks(g)
	m.fences.dirty = true // a node may have stopped hosting
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

// createRegion makes regions, or answers with newer ones of the kind that others have asked for.
// The answer comes when they are open.
func (rc *reconfig) createRegion(waiter uint64, r *quarrypb.CreateRegionRequest, random []byte) {
	r = proto.CloneOf(r)
	if r.Count == 0 {
		r.Count = 1
	}
	if r.Replicas == 0 {
		r.Replicas = rc.m.defaultReplicas()
	}
	if r.Durability == 0 {
		r.Durability = quarrypb.Durability_DURABILITY_MEM
	}
	err := rc.checkCreate(r, random)
	if err == nil && r.Space != nil {
		err = rc.placeInSpace(r)
	}
	if err != nil {
		rc.m.fail(waiter, err)
		return
	}
	if r.UnlessNewerThan != nil && r.Space == nil && rc.joinCreation(waiter, r) {
		return
	}
	rc.create([]uint64{waiter}, r, random, nil, len(rc.m.nodes))
}

// create makes regions and answers all requests that wait for them. refused is why nodes that were
// chosen before had no room; nil at first. tries bounds the attempts that are left.
func (rc *reconfig) create(waiters []uint64, r *quarrypb.CreateRegionRequest, random []byte, refused *Error, tries int) {
	fail := func(waiters []uint64, err *Error) {
		if err.Code == Exhausted {
			rc.m.reclaims.noRoom()
		}
		for _, w := range waiters {
			rc.m.fail(w, err)
		}
	}
	sets, err := rc.m.placeAll(r)
	if err != nil {
		if refused != nil {
			err = errorf(Exhausted, "%s; %s", err.Text, refused.Text)
		}
		fail(waiters, err)
		return
	}
	c := rc.m.editCluster()
	changes := []change{}
	var made []*region
	for i, set := range sets {
		rec := &quarrypb.Region{
			Id: c.NextRegion, Uuid: slices.Clone(random[16*i : 16*i+16]), SizeBytes: set.bytes, Epoch: 1,
			State: quarrypb.RegionState_REGION_STATE_CREATING, Durability: r.Durability, WantReplicas: r.Replicas, Tenant: r.Tenant,
		}
		if r.OpenWords {
			rec.Kind = quarrypb.RegionKind_REGION_KIND_OPEN_SLABS
		}
		if r.Space != nil {
			rec.Kind, rec.Space = quarrypb.RegionKind_REGION_KIND_RAW, proto.CloneOf(r.Space)
			rec.Space.Index += uint32(i)
		}
		c.NextRegion++
		for _, n := range set.nodes {
			rec.Replicas = append(rec.Replicas, &quarrypb.Replica{
				Node: n.rec.Id, Incarnation: n.rec.Incarnation, State: quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC,
			})
		}
		g := &region{}
		rc.m.assign(g, rec)
		changes = append(changes, rc.m.regionChange(g, rec, nil))
		rc.m.regions = append(rc.m.regions, g) // numbers rise
		made = append(made, g)
	}
	rc.m.stage(append(changes, rc.m.clusterChange(c))...)

	j := rc.m.agents.newJob(made)
	j.waiters = waiters
	j.give = true
	j.fail = func(err *Error) {
		rc.m.note("%d regions could not be made: %v", len(made), err)
		if err.Code != Exhausted || tries <= 1 {
			fail(j.waiters, err)
			rc.undo(made, func() {})
			return
		}
		// A node that was chosen has no room. It is left out for a time. A creation tries at
		// most once for each node: slow refusals may outlast that time.
		rc.undo(made, func() { rc.create(j.waiters, r, random, err, tries-1) })
	}
	// Fences do not wait for the nodes of a region that is being made: no client can use it,
	// and one of them may die. So each of them has acknowledged every fence that is
	// complete when the region enters the table (the gate is looked at up to then); from
	// then on fences wait for them.
	j.step(rc.m.legs(made, rc.m.host(false)), func() {
		j.gate = func() bool { return rc.m.owesNothing(made) }
		j.step(rc.m.legs(made, rc.m.openAt(1)), func() { rc.publish(j, made) })
	})
}

// publish ends a creation: the regions enter the table.
func (rc *reconfig) publish(j *job, made []*region) {
	changes := []change{}
	resp := &quarrypb.CreateRegionResponse{}
	for _, g := range made {
		rec := proto.CloneOf(g.rec)
		rec.State = quarrypb.RegionState_REGION_STATE_OPEN
		changes = append(changes, rc.m.regionChange(g, rec, nil))
		resp.Regions = append(resp.Regions, rec)
		rc.m.note("region %d is open with %d replicas of %s", rec.Id, len(rec.Replicas), bytesText(rec.SizeBytes))
	}
	rc.m.stage(changes...)
	j.end()
	for _, w := range j.waiters {
		rc.m.answer(w, resp)
	}
}

// checkCreate refuses requests beyond the limits.
func (rc *reconfig) checkCreate(r *quarrypb.CreateRegionRequest, random []byte) *Error {
	if r.Replicas < 1 || r.Replicas > MaxReplicas {
		return errorf(Invalid, "%d replicas: want 1 to %d", r.Replicas, MaxReplicas)
	}
	if r.Count > MaxCount {
		return errorf(Invalid, "%d regions in one request: want at most %d", r.Count, MaxCount)
	}
	if _, err := wire.NewGeometry(r.SizeBytes); err != nil && r.SizeBytes != 0 && r.Space == nil {
		return errorf(Invalid, "%v", err)
	}
	if r.Durability > quarrypb.Durability_DURABILITY_PMEM || r.Durability < 0 {
		return errorf(Invalid, "durability %d: want mem or pmem", r.Durability)
	}
	if r.OpenWords && r.Space != nil {
		return errorf(Invalid, "a space has no slabs whose words could be open")
	}
	if len(rc.m.regions)+int(r.Count) > MaxRegions {
		return errorf(Exhausted, "the cluster has %d regions, the most there can be are %d", len(rc.m.regions), MaxRegions)
	}
	switch t, err := rc.m.tenant(r.Tenant); {
	case err != nil:
		return err
	case t.rec.Deleting:
		return t.leaving()
	}
	if len(random) < 16*int(r.Count) {
		return errorf(Internal, "%d random bytes for %d regions", len(random), r.Count)
	}
	return nil
}

// joinCreation answers a request by newer regions of the same kind that others have
// asked for, made or in the making.
func (rc *reconfig) joinCreation(waiter uint64, r *quarrypb.CreateRegionRequest) bool {
	resp := &quarrypb.CreateRegionResponse{}
	var making *job
	for _, g := range rc.m.regions {
		if g.rec.Id <= *r.UnlessNewerThan || !sameKind(g.rec, r) {
			continue
		}
		switch {
		case g.pub != nil && g.rec.Usable():
			resp.Regions = append(resp.Regions, g.pub)
		case g.job != nil && g.job.give && g.job.err == nil:
			making = g.job
		}
	}
	switch {
	case len(resp.Regions) > 0:
		rc.m.answer(waiter, resp)
	case making != nil:
		making.waiters = append(making.waiters, waiter)
	default:
		return false
	}
	return true
}

// undo takes back regions that are not in the table: their memory first, so that a
// new leader finds the records of what is left to do. A node that is lost meanwhile is
// not waited for: it drops the memory when it answers or registers again. then runs at
// the end.
func (rc *reconfig) undo(gone []*region, then func()) {
	j := rc.m.agents.newJob(gone)
	j.step(rc.m.legs(gone, rc.m.drop), func() {
		changes := []change{}
		for _, g := range gone {
			changes = append(changes, rc.strike(g))
		}
		rc.m.stage(changes...)
		j.end()
		then()
	})
}

// strike is the change that takes a region out of the records, which the machine
// forgets at once. Nothing waits for it any more.
func (rc *reconfig) strike(g *region) change {
	rc.m.account(g.rec, -1)
	rc.m.agents.endPrograms(g)
	rc.m.regions = slices.DeleteFunc(rc.m.regions, func(o *region) bool { return o == g })
	rc.m.fences.unexpose(g)
	rc.m.fences.dirty, rc.m.fences.certsDirty = true, true
	return change{regionKey(g.rec.Id), nil, nil}
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

// host is a leg that makes a replica's memory; with mustExist it only confirms that it is there.
func (m *Machine) host(mustExist bool) func(g *region, n *node) *leg {
	return func(g *region, n *node) *leg {
		return &leg{n: n, timeout: hostTimeout, msg: &quarrypb.HostRegionRequest{
			Region: g.rec.Id, Uuid: g.rec.Uuid, Cluster: m.cluster.Uuid,
			SizeBytes: g.rec.SizeBytes, Durability: g.rec.Durability, MustExist: mustExist,
			ControllerTerm: m.term, Epoch: g.rec.Epoch, Kind: g.rec.Kind,
		}}
	}
}

// openAt is a leg that opens a replica under an epoch, at its adapter.
func (m *Machine) openAt(epoch uint64) func(g *region, n *node) *leg {
	return func(g *region, n *node) *leg {
		return &leg{n: n, timeout: callTimeout, msg: &quarrypb.OpenRegionRequest{
			Region: g.rec.Id, Epoch: epoch, ControllerTerm: m.term, Tenant: g.rec.Tenant, Adapter: g.on(n.rec.Id).Adapter,
		}}
	}
}

// shut is a leg that closes all epochs of a replica before the region's present one.
func (m *Machine) shut(g *region, n *node) *leg {
	return &leg{n: n, timeout: callTimeout, msg: &quarrypb.CloseRegionRequest{Region: g.rec.Id, Epoch: g.rec.Epoch - 1, ControllerTerm: m.term}}
}

// drop has a node give memory back. One that is lost drops it when it answers or registers again.
func (m *Machine) drop(g *region, n *node) *leg {
	l := &leg{n: n, timeout: callTimeout, msg: &quarrypb.DropRegionRequest{Region: g.rec.Id, ControllerTerm: m.term, Epoch: g.rec.Epoch}}
	l.waive = func() bool {
		if n.lost {
			n.drops = append(n.drops, l.msg)
		}
		return n.lost || n.rec.State == nodeDown
	}
	return l
}

// owesNothing says whether the nodes that regions are on have acknowledged every fence.
func (m *Machine) owesNothing(regions []*region) bool { return m.owesNothingOf(regions, m.now) }

// owesNothingOf says whether the nodes that regions are on have acknowledged every fence that
// began at t (ns) or before.
func (m *Machine) owesNothingOf(regions []*region, t int64) bool {
	owes := func(serial uint64) bool {
		s := m.session(serial)
		return s == nil || s.fenceBegan <= t
	}
	for _, g := range regions {
		for _, r := range g.rec.Replicas {
			if n := m.node(r.Node); n != nil && r.State != out && (!n.seen || slices.ContainsFunc(n.owed, owes)) {
				return false
			}
		}
	}
	return true
}
