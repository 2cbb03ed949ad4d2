package state

import (
	"slices"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// What makes a node a lost one: late heartbeats, calls without an answer, clients'
// trouble, gossip and connections that end only raise a suspicion; the controller's own probes decide.
const (
	suspectProbes = 3                      // in a row without the right answer
	probeTimeout  = 500 * time.Millisecond // of one
	probeGap      = 50 * time.Millisecond  // between two while it is open what they say
	probeLost     = 500 * time.Millisecond // between two of a lost node
	probeCalm     = 100 * time.Millisecond // after a good one no suspicion counts
	// rejoinAfter is how long a node must have answered before its replicas are
	// rebuilt there; it doubles with every loss, up to rejoinMost.
	rejoinAfter = time.Second
	rejoinMost  = time.Minute
)

// suspectAfter is the silence that raises a suspicion. Nodes send two heartbeats in NodeHeartbeat.
func (m *Machine) suspectAfter() int64 { return int64(m.cfg.NodeHeartbeat) * 3 / 2 }

// doubt has a node probed now.
func (m *Machine) doubt(n *node) {
	if n.suspect || n.lost || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN || m.now < n.calmUntil {
		return
	}
	n.suspect, n.probeNext = true, m.now
	m.probe(n)
}

// watch looks after the nodes.
func (m *Machine) watch() {
	for _, n := range m.nodes {
		if n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			continue
		}
		if m.now-n.heard > m.suspectAfter() {
			m.doubt(n)
		}
		m.probe(n)
		m.judgeSick(n)
	}
}

func (m *Machine) probe(n *node) {
	if n.probing || !n.suspect && !n.lost || m.now < n.probeNext {
		return
	}
	n.probing = true
	life, sent := n.rec.Incarnation, m.now
	m.callURL(Call{Node: n.rec.Id, URL: n.rec.AgentUrl, Msg: &quarrypb.PingRequest{}, Timeout: int64(probeTimeout)}, func(r Reply) {
		n.probing = false
		if n.rec.Incarnation != life || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			return
		}
		if pong, _ := r.Msg.(*quarrypb.PingResponse); pong != nil && pong.Incarnation == life {
			m.probed(n, sent)
		} else {
			m.unanswered(n)
		}
	})
}

// probed: the node has answered a probe sent at a time.
func (m *Machine) probed(n *node, sent int64) {
	doubted := n.lost || n.fails > 0 || !m.up(n) || n.wanted
	n.proved, n.provedAt, n.wanted = true, sent, false
	n.heard, n.calmUntil = m.now, m.now+int64(probeCalm)
	n.fails, n.suspect = 0, false
	if n.lost && m.now < n.sickUntil {
		n.probeNext = m.now + int64(probeLost)
		return
	}
	if n.lost {
		n.lost, n.upSince = false, m.now
		m.note("node %s (%d) answers again", n.rec.Name, n.rec.Id)
	}
	if doubted {
		m.revisit(n)
	}
}

// unanswered counts a probe without the right answer.
func (m *Machine) unanswered(n *node) {
	n.fails++
	n.probeNext = m.now + int64(probeGap)
	if n.lost {
		n.probeNext = m.now + int64(probeLost)
		return
	}
	if n.fails < suspectProbes {
		return
	}
	m.note("node %s (%d) is lost: %d probes in a row without an answer from its life %d", n.rec.Name, n.rec.Id, n.fails, n.rec.Incarnation)
	m.lose(n)
}

// lose takes a node for lost.
func (m *Machine) lose(n *node) {
	n.lost, n.suspect = true, false
	n.goneAt, n.proved, n.wanted = m.now, false, false
	n.losses++
	m.revisit(n)
}

// survivorsAnswer says whether every replica of a region that is to go on without
// others has answered a probe sent since it became known that those are gone. What
// took the one may have taken the other a moment later: a heartbeat of before says
// nothing, and a region must not give up the last replica that has its memory for
// one that is dead. Those that have not are probed.
func (m *Machine) survivorsAnswer(g *region) bool {
	since := m.began
	for _, r := range g.rec.Replicas {
		if h := m.health(r); r.State != out && (h == missing || h == stale) {
			since = max(since, m.node(r.Node).goneAt)
		}
	}
	all := true
	for _, r := range g.rec.Replicas {
		if n := m.node(r.Node); r.State == inSync && m.health(r) == well && !(n.proved && n.provedAt >= since) {
			all = false
			n.suspect, n.wanted, n.probeNext = true, true, m.now
			m.probe(n)
		}
	}
	return all
}

// revisit settles the regions of a node of which more is known now.
func (m *Machine) revisit(n *node) {
	for _, g := range slices.Clone(m.regions) {
		if g.on(n.rec.Id) != nil {
			m.settle(g)
		}
	}
}

// steady says whether a node has been well for long enough to be given a replica to rebuild.
func (m *Machine) steady(n *node) bool {
	wait := min(rejoinAfter<<min(n.losses, 10), rejoinMost)
	return m.up(n) && n.fails == 0 && n.rec.State == quarrypb.NodeState_NODE_STATE_UP &&
		m.now >= n.upSince+int64(wait) && m.now >= n.refusedUntil
}

// troubled takes what a client says of nodes that it cannot work with.
func (m *Machine) troubled(s *session, troubles []*quarrypb.NodeTrouble) {
	for _, t := range troubles[:min(len(troubles), MaxTroubles)] {
		if n := m.node(t.Node); n != nil && t.BrokenRounds+t.Timeouts > 0 {
			m.complain(n, s.rec.Serial)
		}
	}
}
