package state

import (
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file watches storage nodes: what makes a node suspect, how it is probed, and when it is
// lost.

// A node is lost when three probes of this controller in a row have not been answered by its
// incarnation. Anything that may be a sign of trouble makes it suspect, so that it is probed:
// late heartbeats, calls without an answer, complaints of clients, the pulse, connections that
// end. Two kinds of nodes are given up although they answer probes: see sick.go.
const (
	suspectProbes = 3                      // probes in a row without the right answer make a node lost
	probeGap      = 50 * time.Millisecond  // from the outcome of a failed probe of a suspect node to the next
	refusedGap    = 10 * time.Millisecond  // the same where the host of the node refused the connection: no process listens there
	probeLost     = 500 * time.Millisecond // the same for a node that is lost or unfit
	probeCalm     = 100 * time.Millisecond // after an answered probe no suspicion is taken up
	// rejoinAfter is how long a node must have answered before its replicas are
	// rebuilt there; it doubles with every loss, up to rejoinMost.
	rejoinAfter = time.Second
	rejoinMost  = time.Minute
)

// DefaultProbeTimeout is how long a node has for the answer to one probe.
const DefaultProbeTimeout = 500 * time.Millisecond

// suspectAfter is the silence, in ns, after which a node becomes suspect. Nodes send two
// heartbeats in NodeHeartbeat, so that three are missing then.
func (m *Machine) suspectAfter() int64 { return int64(m.cfg.NodeHeartbeat) * 3 / 2 }

// calm says whether a node may send heartbeats rarely (Config.CalmHeartbeat): the pulse would
// show its end sooner.
func (m *Machine) calm(n *node) bool {
	return m.cfg.CalmHeartbeat > m.cfg.NodeHeartbeat && !n.stopping && !n.suspect && m.up(n)
}

// beaten records a heartbeat. next is how long the node may take for the next one.
func (m *Machine) beaten(n *node, next time.Duration) {
	n.heard, n.due = m.now, m.now+m.suspectAfter()+int64(next)
}

// pulseLate ends calm for a node whose pulse is not heard: it becomes suspect unless its
// heartbeats come often again. The answer to the next one asks for that.
func (m *Machine) pulseLate(ev PulseLate) {
	if n := m.node(ev.Node); n != nil && n.rec.Incarnation == ev.Incarnation {
		n.due = min(n.due, m.now+m.suspectAfter())
	}
}

// doubt makes a node suspect, and probes it now.
func (m *Machine) doubt(n *node) {
	if n.suspect || n.lost || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN || m.now < n.calmUntil {
		return
	}
	n.suspect, n.probeNext = true, m.now
	m.probe(n)
}

// watch makes nodes suspect whose heartbeats are late, and sends the probes that are due.
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

// probe sends a Ping to a node that is suspect, lost or unfit, if it is due and none is under
// way. Only the answer of the same incarnation counts as an answer.
func (m *Machine) probe(n *node) {
	if n.probing || !n.suspect && !n.lost && n.unfit == "" || m.now < n.probeNext {
		return
	}
	m.probeAfter(n, 0)
}

// probeAfter sends a Ping, after ns from now. Ticks are too rare to time the probes behind a refused one.
func (m *Machine) probeAfter(n *node, after int64) {
	n.probing = true
	incarnation, sent := n.rec.Incarnation, m.now
	m.agents.callURL(Call{Node: n.rec.Id, URL: n.rec.AgentUrl, Msg: &quarrypb.PingRequest{}, Timeout: int64(m.cfg.ProbeTimeout), After: after}, func(r Reply) {
		n.probing = false
		if n.rec.Incarnation != incarnation || n.rec.State == quarrypb.NodeState_NODE_STATE_DOWN {
			return
		}
		if pong, _ := r.Msg.(*quarrypb.PingResponse); pong != nil && pong.Incarnation == incarnation {
			m.judgeFit(n, pong.Unfit)
			m.probed(n, sent)
		} else {
			m.unanswered(n, r.NoListener)
		}
	})
}

// probed records that a node has answered a probe sent at a time, in ns. A lost node is well
// again unless it is in quarantine (sickUntil). The regions of a node that was doubted are
// reassessed.
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

// unanswered counts a probe without the right answer. The third in a row makes the node lost.
// refused: the host of the node refused the connection.
func (m *Machine) unanswered(n *node, refused bool) {
	n.refused = refused && (n.refused || n.fails == 0)
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
		if refused {
			m.probeAfter(n, int64(refusedGap))
		}
		return
	}
	how := fmt.Sprintf("%d probes in a row without an answer from its incarnation %d", n.fails, n.rec.Incarnation)
	if n.refused {
		how = fmt.Sprintf("its host refused %d connections in a row to %s: no process listens there", n.fails, n.rec.AgentUrl)
	}
	m.note("node %s (%d) is lost: %s", n.rec.Name, n.rec.Id, how)
	m.lose(n)
}

// lose makes a node lost: its replicas are missing from now on, and their regions are reassessed.
func (m *Machine) lose(n *node) {
	n.lost, n.suspect = true, false
	n.goneAt, n.proved, n.wanted = m.now, false, false
	if !n.stopping { // else its end was announced
		n.losses++
	}
	m.reconfig.reassessNode(n)
}

// survivorsAnswer says whether each in-sync replica that is to stay has answered a probe which
// was sent after the loss of the others was known. An earlier sign of life does not count: what
// ended one node may have ended another a moment later, and a region must not give up the last
// replica that has its memory for one that is dead. It probes those that have not answered yet;
// probed then has the region reassessed.
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

// reassessNode reassesses every region with a replica on a node whose health may have changed.
func (rc *reconfig) reassessNode(n *node) {
	for _, g := range slices.Clone(rc.m.regions) {
		if g.on(n.rec.Id) != nil {
			rc.reassess(g)
		}
	}
}

// steady says whether a node may be given a replica to rebuild: it is up, and has been so for
// rejoinAfter, doubled with each of its losses. So a node that comes and goes does not have
// regions rebuilt in vain.
func (m *Machine) steady(n *node) bool {
	wait := min(rejoinAfter<<min(n.losses, 10), rejoinMost)
	return m.up(n) && n.fails == 0 && !n.stopping && n.rec.State == quarrypb.NodeState_NODE_STATE_UP &&
		m.now >= n.upSince+int64(wait) && m.now >= n.refusedUntil
}

// troubled records the complaints of a client about nodes that it cannot work with.
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
