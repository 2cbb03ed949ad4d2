package sim

import (
	"fmt"
	"sync"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/slab"
)

// treeStep is one operation of treePlan.
type treeStep struct {
	op  treeOp
	key int
}

// treePlan puts keys, most of them pair by pair with the higher one first and the last ones in rising
// order, and deletes all in reverse order. In its course the root grows, leaves are cut in halves and
// at a key and are merged, and the root absorbs its only child.
func treePlan() []treeStep {
	var plan []treeStep
	for i := range treeKeys {
		if i < treeKeys-fixedKeys {
			i ^= 1
		}
		if i%fixedKeys != 0 {
			plan = append(plan, treeStep{treePut, i})
		}
	}
	for i := treeKeys - 1; i >= 0; i-- {
		if i%fixedKeys != 0 {
			plan = append(plan, treeStep{treeDelete, i})
		}
	}
	return plan
}

// What client 0 does in the crash matrix of the tree.
const (
	treeDoesGet = iota
	treeDoesPut
	treeDoesPutLarge // a value of its own slab
	treeDoesDelete
	treeDoesScan
	treeDoesSplit
	treeDoesSplitAtKey
	treeDoesGrow
	treeDoesMerge
	treeDoesShrink
	treeDoesCollect
	treeDoesCompact
	treeWhats
)

var treeWhatNames = [treeWhats]string{"get", "put", "put-large", "delete", "scan", "split", "split-at-key", "grow", "merge", "shrink", "collect", "compact"}

// treeSteps returns, for each operation of client 0, the step of the plan at which it is done.
// Where the structure is to change, client 0 does the step that changes it.
var treeSteps = sync.OnceValue(func() (at [treeWhats]int) {
	w := newWorld()
	defer w.close()
	w.d.replicas = 1
	t := &tree{w: w, mem: treeMemory{w: w}}
	w.tree = t
	m := &t.mem
	m.seedBlock()
	sh, err := btree.Make(m, btree.Config{NodeBytes: treeNodeBytes})
	if err != nil {
		panic(err)
	}
	p := btree.NewProgram(sh, m)
	for i := 0; i < treeKeys; i += fixedKeys {
		t.seed(p, treeStep{treePut, i})
	}
	plan := treePlan()
	for i := range at {
		at[i] = treeKeys / 2
	}
	before := sh.Changes()
	for i, s := range plan {
		t.seed(p, s)
		now := sh.Changes()
		rose := func(name string) bool { return now[name] > before[name] }
		switch {
		case rose("shrinks"):
			at[treeDoesShrink] = i
		case rose("merges"):
			at[treeDoesMerge] = i
		case rose("grows") && now["grows"] == 1:
			at[treeDoesGrow] = i
		case rose("splits_at_key") && !rose("grows"):
			at[treeDoesSplitAtKey] = i
		case rose("splits") && !rose("grows"):
			at[treeDoesSplit] = i
		}
		before = now
	}
	for _, n := range []string{"splits", "splits_at_key", "grows", "merges", "shrinks"} {
		if before[n] == 0 {
			panic(fmt.Sprintf("the plan of the tree has no %s", n))
		}
	}
	return at
})

// treeScript configures a directed schedule with a tree.
type treeScript struct {
	what     int
	collects bool   // CollectBeside
	session  uint32 // of client 0 when the fault happened
}

// CrashTree is one cell of the crash matrix of the tree: client 0 does the operation while two
// others work on keys nearby, and the fault happens after the verb at. For Options.Tree.
func CrashTree(what, at int, f Fault, node int) *Script {
	s := &Script{Name: "tree", At: at, Fault: f, Node: node, tree: &treeScript{what: what}}
	s.Start = func(w *world) {
		s.trap = trap{}
		late, over := w.ch.choose(2) == 1, false
		for i := range 3 {
			c := &w.clients[i]
			if c.left = 3; s.Linger > 0 {
				c.left = 12
			}
			switch {
			case i == 0:
				c.start(func() { over = w.tree.struck(c, s); c.work() })
			case late:
				c.start(func() { w.tree.after(c, i == 2, func() bool { return over || s.trap.sprung }) })
			default:
				c.start(c.work)
			}
		}
	}
	return s
}

// CollectBeside is a schedule that tests the orphan rule: client 0 does an operation, and the
// fault happens after the verb at. The fault leaves the session in any state in which a commit
// may still come: it stands still for up to five leases, or it is revoked and learns of it
// late, or it dies. Meanwhile client 1 collects repeatedly. Once it has freed an object it may
// stop the primary's node, so that the failover keeps the state of a backup. Client 2 uses the
// tree afterwards.
func CollectBeside(what, at int, f Fault, node int) *Script {
	s := CrashTree(what, at, f, node)
	s.Name, s.tree.collects = "collect", true
	s.lease = 400 // with a shorter one, sessions would end during a few operations
	s.Start = func(w *world) {
		s.trap, s.tree.session = trap{}, 0
		w.d.patience = max(w.d.patience, 4*w.d.lease)
		over := false
		for i := range 3 {
			c := &w.clients[i]
			c.left = 6
			c.start(func() {
				switch i {
				case 0:
					over = w.tree.struck(c, s)
					w.tree.makes(c)
				case 1:
					w.tree.collector(c, s)
				default:
					w.tree.after(c, true, func() bool { return over })
				}
			})
		}
	}
	s.also = func(w *world) {
		c := &w.clients[0]
		s.tree.session = c.session
		if w.ch.choose(3) == 2 {
			// Its verbs in flight are late, and the primary's node cannot be told of a fence.
			for i, conn := range c.conns {
				if conn != nil {
					conn.Stall(true)
					w.faults = append(w.faults, faultPlan{kind: Stall, state: 1, at: w.now, lasts: int64(1+w.ch.choose(200)) * step, who: 0, node: i, conn: conn})
				}
			}
			w.faults = append(w.faults, faultPlan{kind: CutControl, at: w.now, lasts: w.d.lease / 100 * int64(1+w.ch.choose(60)), node: w.mirror.table.node[0], detail: 2})
			w.at(w.now)
		}
		c.dawdles = int64(w.ch.choose(6)) * w.d.lease
		if w.ch.choose(2) == 1 {
			w.mach.scrubsHeld = w.now + int64(1+w.ch.choose(5))*w.d.lease
		}
		if s.Fault != Kill && w.ch.choose(2) == 1 {
			c.freeze(w.now + int64(1+w.ch.choose(10))*w.d.lease/2)
		}
	}
	return s
}

// makes puts values that have slabs of their own, slowly, in several sessions one after the other.
func (t *tree) makes(c *client) {
	if t.w.ch.choose(2) == 1 {
		c.end("closed")
	}
	p := t.open(c)
	for range 4 {
		if p == nil || t.w.failed != nil {
			break
		}
		c.dawdles = int64(t.w.ch.choose(4)) * t.w.d.lease / 4
		t.strike(c, p, treeDoesPutLarge)
		if t.w.ch.choose(2) == 1 && c.session != 0 {
			c.end("closed")
		}
	}
	if c.session != 0 && !c.ended {
		c.end("closed")
	}
}

// collector collects while another client is at work.
func (t *tree) collector(c *client, s *Script) {
	w := t.w
	p := t.open(c)
	if p == nil {
		return
	}
	for n := 0; n < 400 && !s.trap.sprung && !w.clients[0].ended; n++ {
		c.sleep(2 * step)
	}
	down := false
	for range 24 {
		if w.failed != nil {
			return
		}
		// Wait until client 0's session is in a random state.
		state := slab.SessionState(w.ch.choose(int(slab.SessionFenced) + 1))
		for n := 0; n < 300 && t.stateOf(&w.clients[0], s.tree.session) != state; n++ {
			c.sleep(2 * step)
		}
		if freed, _ := t.collect(c, p, false); freed > 0 && !down && w.d.replicas > 1 && w.ch.choose(2) == 1 {
			down = true
			w.faults = append(w.faults, faultPlan{kind: NodeDown, at: w.now, lasts: 3 * w.d.lease, node: w.mirror.table.node[0], detail: 1})
			w.at(w.now)
		}
		c.sleep(int64(1+w.ch.choose(60)) * step)
	}
	if !c.ended {
		c.end("closed")
	}
}

// stateOf is the state of a session that client c has or has had.
func (t *tree) stateOf(c *client, id uint32) slab.SessionState {
	switch s := &t.w.mirror.sess[id]; {
	case s.closing && s.state == sessionFencing:
		return slab.SessionClosing
	case s.state == sessionFencing:
		return slab.SessionFencing
	case s.state == sessionFenced:
		return slab.SessionFenced
	case s.state == sessionFree:
		return slab.SessionGone
	case c.session == id && c.clock() >= c.leaseUntil:
		return slab.SessionExpired
	}
	return slab.SessionLive
}

// struck is the program of client 0.
func (t *tree) struck(c *client, s *Script) bool {
	p := t.open(c)
	if p == nil {
		return true
	}
	// Fill the magazines: the claim of slabs is not part of this matrix.
	if ref, err := (treeStore{c}).Alloc([]byte("warm"), 1, treeClass.PayloadBytes(t.w.kind()), false); err == nil {
		_ = treeStore{c}.Free(ref)
	}
	if t.w.ch.choose(2) == 1 {
		t.do(c, p, treeGet, t.near)
	}
	s.trap.armed = true
	t.strike(c, p, s.tree.what)
	s.trap.armed = false
	c.left = 2
	return true
}

// after is the program of a client that uses the tree after client 0's fault: a reader that has
// cached the tree before, or a writer that has not.
func (t *tree) after(c *client, reads bool, over func() bool) {
	var p *btree.Program
	if reads {
		if p = t.open(c); p == nil {
			return
		}
		for i := -4; i <= 4; i++ {
			t.do(c, p, treeGet, t.around(i))
		}
	}
	for n := 0; n < 400 && !over(); n++ {
		c.sleep(5 * step)
	}
	if p == nil {
		if p = t.open(c); p == nil {
			return
		}
	}
	for range 8 {
		op := treePut
		if reads {
			op = treeGet
		}
		t.do(c, p, op, t.around(t.w.ch.choose(9)-4))
	}
	t.workOn(c, p)
}

// strike does the operation during which the fault happens.
func (t *tree) strike(c *client, p *btree.Program, what int) {
	switch what {
	case treeDoesGet:
		t.do(c, p, treeGet, t.near)
	case treeDoesScan:
		t.scan(c, p)
	case treeDoesCollect:
		t.collect(c, p, false)
	case treeDoesCompact:
		t.compact(c, p)
	case treeDoesDelete, treeDoesMerge, treeDoesShrink:
		t.do(c, p, treeDelete, t.near)
	case treeDoesPutLarge:
		t.values = t.values&^15 + 14 // the next one is large
		t.do(c, p, treePut, t.near)
	default:
		t.do(c, p, treePut, t.near)
	}
}
