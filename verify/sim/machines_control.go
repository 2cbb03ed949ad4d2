package sim

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// controller is a controller process. It does in virtual time what package controller does
// around the state machine. It campaigns, and has a term while it leads.
type controller struct {
	m           *machines // the machines it belongs to
	id          int       // its place in machines.ctls
	rate        int64     // its clock runs at rate/1000
	up          bool      // the process runs
	incarnation int       // of the process
	frozen      bool      // it stands still
	held        []func()  // messages that have arrived while it is frozen
	term        *term     // nil: it does not lead
}

// term is one leadership: a state machine and the calls that it has made.
type term struct {
	c       *controller                   // the controller that leads
	rev     uint64                        // of the election key
	mach    *state.Machine                // the shipped machine
	over    bool                          // its answers and events are dropped
	heard   int64                         // when etcd extended its lease last, by the controller's clock
	waiters map[uint64]func(state.Answer) // callers of Asks
	last    uint64                        // number of the last waiter
}

const (
	electionTTL = int64(2e9)
	leadMargin  = int64(200e6)
	keepEvery   = int64(300e6)
	etcdTimeout = electionTTL
	tickEvery   = 4 * int64(state.TickEvery)
)

var errNoAnswer = errors.New("no answer in time")

func (c *controller) reset(m *machines, id int) {
	*c = controller{m: m, id: id, rate: 1000, up: true, incarnation: c.incarnation + 1}
	switch m.w.ch.choose(4) {
	case 1:
		c.rate = 991
	case 2:
		c.rate = 1009
	}
	c.later(int64(1+m.w.ch.choose(20))*step, c.campaign)
}

// clock is the controller's monotonic clock, in ns.
func (c *controller) clock() int64 { return c.m.w.now * c.rate / 1000 * c.m.unit }

// later calls f after d, unless the process has died. A process that stands still calls it
// when it goes on.
func (c *controller) later(d int64, run func()) {
	incarnation := c.incarnation
	c.m.after(d, func() { c.deliver(incarnation, run) })
}

func (c *controller) deliver(incarnation int, run func()) {
	switch {
	case c.incarnation != incarnation || !c.up:
	case c.frozen:
		c.held = append(c.held, func() { c.deliver(incarnation, run) })
	default:
		run()
	}
}

func (c *controller) thaw() {
	c.frozen = false
	for _, f := range c.held {
		c.m.after(0, f)
	}
	c.held = nil
}

// die ends the process; start begins the next one.
func (c *controller) die() {
	c.m.w.logf("controller %d: killed", c.id)
	if c.term != nil {
		c.term.over = true
	}
	c.up, c.term = false, nil
	c.incarnation++
}

func (c *controller) start() {
	if c.up {
		return
	}
	c.up, c.frozen, c.held = true, false, nil
	c.later(step, c.campaign)
}

// askEtcd sends a request to etcd. request runs at etcd and returns the function that runs at
// the controller with the answer. lost runs if no answer comes in time; etcd may have carried the request out.
func (c *controller) askEtcd(request func() func(), lost func()) {
	m, incarnation, done := c.m, c.incarnation, false
	finish := func(f func()) {
		c.deliver(incarnation, func() {
			if !done {
				done = true
				f()
			}
		})
	}
	m.after(m.units(etcdTimeout), func() { finish(lost) })
	if m.noEtcd[c.id] || m.lose() {
		return
	}
	m.after(m.delay(), func() {
		if m.noEtcd[c.id] {
			return
		}
		answer := request()
		if m.lose() {
			return
		}
		m.after(m.delay(), func() {
			if !m.noEtcd[c.id] {
				finish(answer)
			}
		})
	})
}

// campaign repeats until the controller leads. A loser waits for a watch of the leader's key,
// which may fire late or without a change.
func (c *controller) campaign() {
	m := c.m
	again := func() { c.later(int64(1+m.w.ch.choose(60))*step, c.campaign) }
	c.askEtcd(func() func() {
		rev, ok := m.etcd.campaign(c.id, m.w.now, m.units(electionTTL))
		if !ok {
			return again
		}
		return func() { c.take(rev) }
	}, again)
}

// take makes the state machine of a new leader.
func (c *controller) take(rev uint64) {
	m := c.m
	t := &term{c: c, rev: rev, waiters: map[uint64]func(state.Answer){}}
	c.askEtcd(func() func() {
		records := m.etcd.all()
		return func() {
			var first []state.Action
			var err error
			t.mach, first, err = state.New(m.config(), rev, c.clock(), records, clusterBytes[:])
			if err != nil {
				m.w.fail("a leader cannot begin", err.Error())
				return
			}
			// No request may come before the machine knows that it leads.
			t.extend(func() {
				m.stats.Leaders++
				m.w.logf("controller %d: leads, term %d", c.id, rev)
				c.term = t
				t.act(first)
				c.later(m.units(tickEvery), t.tick)
				c.later(m.units(keepEvery), t.keep)
			}, t.end)
		}
	}, t.end)
}

// end ends a leadership at this controller.
func (t *term) end() {
	c, m := t.c, t.c.m
	if t.over {
		return
	}
	t.over = true
	if c.term == t {
		m.w.logf("controller %d: does not lead any more, term %d", c.id, t.rev)
		c.term = nil
	}
	c.askEtcd(func() func() {
		m.etcd.resign(t.rev, m.w.now)
		return func() {}
	}, func() {})
	c.later(int64(1+m.w.ch.choose(20))*step, c.campaign)
}

// extend extends the lease in etcd, counted from before the request.
func (t *term) extend(then, lost func()) {
	c, m := t.c, t.c.m
	sent := c.clock()
	c.askEtcd(func() func() {
		if !m.etcd.extend(t.rev, m.w.now, m.units(electionTTL)) {
			return lost
		}
		return func() {
			if t.over {
				return
			}
			t.heard = max(t.heard, sent)
			t.step(state.Lead{Until: sent + electionTTL - leadMargin})
			then()
		}
	}, lost)
}

func (t *term) keep() {
	if t.over {
		return
	}
	c, m := t.c, t.c.m
	t.extend(func() {}, func() {
		// The controller notices late that it does not lead. The protocol must not rely on that.
		if t.over || c.clock()-t.heard < electionTTL {
			return
		}
		c.later(m.w.d.lease/10*[...]int64{0, 1, 2, 5, 20, 40}[m.w.ch.choose(6)]+1, t.end)
	})
	c.later(m.units(keepEvery), t.keep)
}

func (t *term) tick() {
	if !t.over {
		t.step(state.Tick{})
		t.c.later(t.c.m.units(tickEvery), t.tick)
	}
}

func (t *term) step(ev state.Event) {
	if !t.over {
		t.act(t.mach.Step(t.c.clock(), ev))
	}
}

func (t *term) act(acts []state.Action) {
	m := t.c.m
	for _, a := range acts {
		switch a := a.(type) {
		case state.Commit:
			t.commit(a)
		case state.Call:
			t.call(a)
		case state.Answer:
			if f := t.waiters[a.Waiter]; f != nil {
				delete(t.waiters, a.Waiter)
				f(a)
			}
		case state.TableChanged:
			m.pushTable(t)
		case state.Note:
			m.w.logf("controller %d: %s", t.c.id, a.Text)
		case state.StepDown:
			m.w.logf("controller %d: steps down: %v", t.c.id, a.Err)
			t.end()
			return
		}
	}
}

func (t *term) commit(a state.Commit) {
	m := t.c.m
	t.c.askEtcd(func() func() {
		rev, err := m.etcd.txn(t.rev, a.Ops, m.w.now)
		if err != nil {
			return func() { t.step(state.Failed{Err: err}) }
		}
		m.stats.Commits++
		m.nodesCommitted(a.Ops)
		for _, op := range a.Ops {
			m.committed(rev, op.Key, op.Value)
		}
		return func() { t.step(state.Committed{Revision: rev}) }
	}, func() { t.step(state.Failed{Err: errNoAnswer}) })
}

// call calls an agent. The request may arrive twice, the second time long after the call has
// ended.
func (t *term) call(a state.Call) {
	c, m := t.c, t.c.m
	m.stats.Calls++
	node, incarnation, done := int(a.Node)-1, c.incarnation, false
	reply := func(r state.Reply) {
		c.deliver(incarnation, func() {
			if !done {
				done = true
				r.Call = a.ID
				t.step(r)
			}
		})
	}
	m.after(m.units(a.Timeout), func() {
		if _, ping := a.Msg.(*quarrypb.PingRequest); ping && !done {
			m.doubt(node)
		}
		reply(state.Reply{Err: errNoAnswer})
	})
	if node < 0 || node >= maxNodes {
		m.w.fail("a call to no node", fmt.Sprint(a.Node))
		return
	}
	send := func() {
		if m.toNode[c.id][node] || m.w.cuts[controllerRow][node] || m.lose() {
			return
		}
		m.after(m.delay(), func() {
			if m.toNode[c.id][node] || m.w.cuts[controllerRow][node] {
				return
			}
			m.agents[node].called(a, func(msg proto.Message, err error, refused bool) {
				if m.lose() {
					return
				}
				m.after(m.delay(), func() {
					if !m.fromNode[c.id][node] && !m.w.cuts[controllerRow][node] {
						reply(state.Reply{Msg: msg, Err: err, Refused: refused})
					}
				})
			})
		})
	}
	send()
	if m.rarely(16) {
		m.stats.Doubled++
		m.after(m.w.d.lease/4*int64(1+m.w.ch.choose(20)), send)
	}
}

// noRandom is what the machine makes uuids of. It only reads it.
var noRandom = make([]byte, 16*state.MaxCount)

// ask gives a request to the machine. The answer, if there is one, is passed to answer.
func (t *term) ask(msg any, answer func(state.Answer)) (waiter uint64) {
	t.last++
	t.waiters[t.last] = answer
	waiter = t.last
	t.step(state.Ask{Waiter: waiter, Msg: msg, Random: noRandom})
	return waiter
}

// pushTable is the clients' watch of the table. Its messages are delayed, duplicated, reordered
// and lost.
func (m *machines) pushTable(t *term) {
	for i := range m.seats {
		if m.w.clients[i].session == 0 || m.w.ch.choose(4) == 3 {
			continue
		}
		t.c.later(m.delay(), func() {
			if t.over {
				return
			}
			t.ask(&quarrypb.ReadTableRequest{}, func(a state.Answer) {
				tab, ok := a.Msg.(*quarrypb.Table)
				if !ok {
					return
				}
				for range 1 + m.w.ch.choose(2) {
					m.after(m.delay(), func() { m.seats[i].heardTable(&m.w.clients[i], t.c.id, tab) })
				}
			})
		})
	}
}
