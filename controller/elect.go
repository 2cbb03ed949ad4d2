package controller

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

// Elections of etcd by the pulse. The members of etcd inside the controllers exchange
// heartbeats slowly, because each one wakes all of them, and count long before they elect
// another leader. The pulse shows sooner that the process of etcd's leader is gone: then the
// members that are left campaign, one after the other.
//
// An unneeded campaign costs time and nothing else: raft elects at most one leader in a term,
// whichever members campaign.

const (
	// electGap is the time between the first campaigns of two members. Within it the first one
	// wins, on disks that sync in some tens of ms. The gap doubles with each cycle: otherwise
	// members with slower disks would interrupt each other's elections.
	electGap = 150 * time.Millisecond
	// maxCampaigns bounds the campaigns of a member against one leader that is gone. Afterwards
	// etcd's own timers decide.
	maxCampaigns = 4
	// electLook is how often a member looks while it may have to campaign.
	electLook = 10 * time.Millisecond
	// probeHolds is how long an unanswered probe counts as a sign that a process is gone, while
	// its pulse is silent.
	probeHolds = time.Second
)

// Member is the member of etcd inside this process.
type Member interface {
	// ID of the member.
	ID() uint64
	// Voters of the cluster.
	Voters() []uint64
	// Lead is the member that leads etcd; 0 if this one knows of none.
	Lead() uint64
	// Campaign has this member campaign at once.
	Campaign(ctx context.Context) error
}

// votes is what a member of etcd sees before it decides whether to campaign.
type votes struct {
	now    int64    // ns
	self   uint64   // this member
	voters []uint64 // all members with a vote
	lead   uint64   // 0: none that is known
	heard  []uint64 // voters whose processes answer the pulse
	// gone: the process of the member that led last answers neither the pulse of any
	// controller nor a probe of this one.
	gone bool
}

// elector decides when a member of etcd campaigns.
//
// Invariants: it campaigns only while the process of the last leader is gone and a majority of
// the voters is heard, so that neither a leader that works is disturbed nor a minority
// campaigns; at most maxCampaigns times against one leader that is gone; and members that see
// the same do not campaign within electGap of each other, nor within twice that in the
// second cycle of campaigns.
type elector struct {
	last      uint64 // member that led last
	since     int64  // ns; when last was found gone; 0: it is not gone
	campaigns int    // against last since then, at most maxCampaigns
}

// step says whether to campaign now.
func (e *elector) step(v votes) bool {
	if v.lead != 0 && v.lead != e.last {
		*e = elector{last: v.lead}
	}
	living := e.living(v)
	if e.last == 0 || e.last == v.self || !v.gone || len(living) <= len(v.voters)/2 {
		e.since, e.campaigns = 0, 0
		return false
	}
	rank := slices.Index(living, v.self)
	if rank < 0 || e.campaigns == maxCampaigns {
		return false
	}
	if e.since == 0 {
		e.since = v.now
	}
	if v.now < e.since+turn(e.campaigns, rank, len(living)) {
		return false
	}
	e.campaigns++
	return true
}

// turn is how long after the loss of the leader a member campaigns, by its rank among n members.
// In one cycle each of them campaigns once, a gap apart; the gap doubles from cycle to cycle.
func turn(cycle, rank, n int) int64 {
	return int64(electGap) * int64((1<<cycle-1)*n+rank<<cycle)
}

// living are the voters that may elect a leader, in order.
func (e *elector) living(v votes) (out []uint64) {
	for _, id := range v.voters {
		if id != e.last && (id == v.self || slices.Contains(v.heard, id)) {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// electEtcd has this controller's member of etcd campaign when elector.step says so.
func (c *Controller) electEtcd() {
	e := &elector{}
	var probed time.Time // the last probe without an answer
	wait := clock.Aligned(lookEvery)
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.pulse.elect:
			c.seeds() // a controller may have begun to stand a moment ago
		case <-time.After(wait):
		}
		m := c.cfg.Member
		last := cmp.Or(m.Lead(), e.last)
		silent := last != 0 && last != m.ID() && c.silentMember(last)
		if silent && time.Since(probed) > probeHolds {
			if silent = !c.reached(last); silent {
				probed = time.Now()
			}
		}
		// The probe took its time: what the member sees may have changed meanwhile.
		v := votes{now: now(), self: m.ID(), voters: m.Voters(), lead: m.Lead(), gone: silent && c.silentMember(last)}
		v.gone = v.gone && (v.lead == 0 || v.lead == last)
		for _, id := range v.voters {
			if c.heardMember(id) {
				v.heard = append(v.heard, id)
			}
		}
		if e.step(v) {
			c.cfg.Logger.Info("controller: the process of etcd's leader is gone, and this member of etcd campaigns", "leader", last, "campaign", e.campaigns)
			c.counted.elections.Add(1)
			if err := m.Campaign(c.ctx); err != nil {
				c.cfg.Logger.Debug("controller: campaign in etcd", "error", err)
			}
		}
		wait = clock.Aligned(lookEvery)
		if e.since != 0 && e.campaigns < maxCampaigns {
			wait = electLook
		}
	}
}

// ofMember are the controllers around a member of etcd: more than one if it was started again
// and its former candidacy is still there.
func (c *Controller) ofMember(id uint64) (out []candidacy) {
	g := &c.pulse
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, k := range g.stand {
		if k.Member == id {
			out = append(out, k)
		}
	}
	return out
}

// silentMember says whether every known controller with this member of etcd is silent, and there
// is one.
func (c *Controller) silentMember(id uint64) bool {
	all := c.ofMember(id)
	return len(all) > 0 && !slices.ContainsFunc(all, func(k candidacy) bool { return !c.silent(k.Incarnation) })
}

// heardMember says whether datagrams pass in both directions between this controller and the one
// with this member of etcd.
func (c *Controller) heardMember(id uint64) bool {
	return slices.ContainsFunc(c.ofMember(id), func(k candidacy) bool { return c.pulsed(k.Incarnation) })
}

// reached says whether some controller, of any incarnation, answers where the one with this
// member of etcd was.
func (c *Controller) reached(id uint64) bool {
	return slices.ContainsFunc(c.ofMember(id), func(k candidacy) bool {
		_, ok := c.probe(k.URL)
		return ok
	})
}

// awaitEtcd waits for a short time while etcd's leader is a process that is silent: a change sent
// to that one would be lost, and its loss would be noticed late.
func (c *Controller) awaitEtcd() {
	m := c.cfg.Member
	if m == nil {
		return
	}
	for end := time.Now().Add(deposeTime); time.Now().Before(end); {
		if lead := m.Lead(); lead != 0 && (lead == m.ID() || !c.silentMember(lead)) {
			return
		}
		select {
		case <-c.ctx.Done():
			return
		case <-time.After(electLook):
		}
	}
}

// probe asks a controller for its health. answers: an HTTP response came, of any status; true
// also when the error does not show that the process is gone. header is that of the response.
func (c *Controller) probe(url string) (header http.Header, answers bool) {
	ctx, cancel := context.WithTimeout(c.ctx, leaderProbeTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return nil, true // not known
	}
	res, err := c.probes.Do(r)
	if err != nil {
		return nil, !unreachable(err)
	}
	res.Body.Close()
	return res.Header, true
}
