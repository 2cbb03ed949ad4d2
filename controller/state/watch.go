package state

import (
	"slices"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A node is lost when three probes of this controller in a row have not had the right
// answer. Late heartbeats, calls without an answer, complaints of clients, the pulse and
// connections that end make it suspect, so that it is probed. Two kinds of nodes are given
// up although they answer probes: see sick.go.
const (
	suspectProbes = 3                      // in a row without the right answer
	probeGap      = 50 * time.Millisecond  // between two while it is open what they say
	probeLost     = 500 * time.Millisecond // between two of a lost node
	probeCalm     = 100 * time.Millisecond // after a good one no suspicion counts
	// rejoinAfter is how long a node must have answered before its replicas are
	// rebuilt there; it doubles with every loss, up to rejoinMost.
	rejoinAfter = time.Second
	rejoinMost  = time.Minute
)

// DefaultProbeTimeout is of one probe.
const DefaultProbeTimeout = 500 * time.Millisecond

// suspectAfter is the silence that raises a suspicion. Nodes send two heartbeats in NodeHeartbeat.
func (m *Machine) suspectAfter() int64 { return int64(m.cfg.NodeHeartbeat) * 3 / 2 }

// calm says whether a node may show signs of life seldom: its pulse tells sooner of its end.
func (m *Machine) calm(n *node) bool {
	return m.cfg.CalmHeartbeat > m.cfg.NodeHeartbeat && !n.stopping && !n.suspect && m.up(n)
}

// beaten notes a heartbeat, and when the next is due.
func (m *Machine) beaten(n *node, next time.Duration) {
	n.heard, n.due = m.now, m.now+m.suspectAfter()+int64(next)
}

// pulseLate expects heartbeats of a node often again; the answer to the next one asks for them.
func (m *Machine) pulseLate(ev PulseLate) {
	if n := m.node(ev.Node); n != nil && n.rec.Incarnation == ev.Incarnation {
		n.due = min(n.due, m.now+m.suspectAfter())
	}
}

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
		if m.now > n.due {
			m.doubt(n)
		}
		m.probe(n)
		m.judgeSick(n)
	}
}

func (m *Machine) probe(n *node) {
	if n.probing || !n.suspect && !n.lost && n.unfit == "" || m.now < n.probeNext {
		return
	}
	n.probing = true
	incarnation, sent := n.rec.Incarnation, m.now
	m.agents.callURL(Call{Node: n.rec.Id, URL: n.rec.AgentUrl, Msg: &quarrypb.PingRequest{}, Timeout: int64(m.cfg.ProbeTimeout)}, func(r Reply) {
		n.probing = false
		if n.rec.Incarnation != incarnation || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			return
		}
		if pong, _ := r.Msg.(*quarrypb.PingResponse); pong != nil && pong.Incarnation == incarnation {
			m.judgeFit(n, pong.Unfit)
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
	n.due = max(n.due, m.now+m.suspectAfter())
	n.fails, n.suspect = 0, false
	if n.unfit != "" {
		n.probeNext = m.now + int64(probeLost)
	}
	if n.lost && m.now < n.sickUntil {
		n.probeNext = m.now + int64(probeLost)
		return
	}
	if n.lost {
		n.lost, n.upSince = false, m.now
		m.note("node %s (%d) answers again", n.rec.Name, n.rec.Id)
		for _, msg := range n.drops {
			m.agents.call(n, msg, callTimeout, func(Reply) {})
		}
		n.drops = nil
	}
	if doubted {
		m.reconfig.reassessNode(n)
	}
}

// unanswered counts a probe without the right answer.
func (m *Machine) unanswered(n *node) {
	n.fails++
	n.probeNext = m.now + int64(probeGap)
	if n.lost {
		n.probeNext = m.now + int64(probeLost)
		if n.fails == suspectProbes {
			m.reconfig.reassessNode(n) // it was in quarantine, and answered until now
		}
		return
	}
	if n.fails < suspectProbes {
		return
	}
	m.note("node %s (%d) is lost: %d probes in a row without an answer from its incarnation %d", n.rec.Name, n.rec.Id, n.fails, n.rec.Incarnation)
	m.lose(n)
}

// lose takes a node for lost.
func (m *Machine) lose(n *node) {
	n.lost, n.suspect = true, false
	n.goneAt, n.proved, n.wanted = m.now, false, false
	if !n.stopping { // else its end was announced
		n.losses++
	}
	m.reconfig.reassessNode(n)
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

// reassessNode settles the regions of a node of which more is known now.
func (rc *reconfig) reassessNode(n *node) {
	for _, g := range slices.Clone(rc.m.regions) {
		if g.on(n.rec.Id) != nil {
			rc.reassess(g)
		}
	}
}

// steady says whether a node has been well for long enough to be given a replica to rebuild.
func (m *Machine) steady(n *node) bool {
	wait := min(rejoinAfter<<min(n.losses, 10), rejoinMost)
	return m.up(n) && n.fails == 0 && !n.stopping && n.rec.State == quarrypb.NodeState_NODE_STATE_UP &&
		m.now >= n.upSince+int64(wait) && m.now >= n.refusedUntil
}

// troubled takes what a client says of nodes that it cannot work with.
func (m *Machine) troubled(s *session, troubles []*quarrypb.NodeTrouble) {
	if s.rec.Agent {
		return // a node opens such sessions at will, and may not decide by them that others are sick
	}
	for _, t := range troubles[:min(len(troubles), MaxTroubles)] {
		if n := m.node(t.Node); n != nil && t.BrokenRounds+t.Timeouts > 0 {
			m.complain(n, s.rec.Serial)
		}
	}
}
