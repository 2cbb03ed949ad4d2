package sim

import (
	"fmt"
	"sync"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/proto"
)

// treeStep is one operation that makes a tree.
type treeStep struct {
	op  treeOp
	key int
}

// treePlan is a way up and down again: all keys are put one after the other, and
// deleted from the other end. Somewhere on it the root grows, a leaf is split, two
// are merged, the root takes its only child over.
func treePlan() []treeStep {
	var plan []treeStep
	for i := range treeKeys {
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
	treeDoesGrow
	treeDoesMerge
	treeDoesShrink
	treeDoesCollect
	treeWhats
)

var treeWhatNames = [treeWhats]string{"get", "put", "put-large", "delete", "scan", "split", "grow", "merge", "shrink", "collect"}

// treeSteps says how far on the plan the tree is when client 0 does what it does:
// its operation is the next one, where the structure is to change.
var treeSteps = sync.OnceValue(func() (at [treeWhats]int) {
	w := newWorld()
	defer w.close()
	w.d.replicas = 1
	t := &tree{w: w, mem: treeMemory{w: w}}
	w.tree = t
	m := &t.mem
	m.seedBlock()
	sh, err := btree.Make(m, btree.Config{NodeBytes: treeClass.Bytes()})
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
		case rose("splits") && !rose("grows"):
			at[treeDoesSplit] = i
		}
		before = now
	}
	for _, n := range []string{"splits", "grows", "merges", "shrinks"} {
		if before[n] == 0 {
			panic(fmt.Sprintf("the plan of the tree has no %s", n))
		}
	}
	return at
})

// treeScript is what a directed schedule with a tree is about.
type treeScript struct{ what int }

// CrashTree is one cell of the crash matrix of the tree: client 0 does the operation
// with two others at work around the same keys, and is struck behind the verb at.
// For Options.Tree.
func CrashTree(what, at int, f Fault, node int) *Script {
	s := &Script{Name: "tree", At: at, Fault: f, Node: node, tree: &treeScript{what}}
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

// struck is the life of the client that does the operation in question.
func (t *tree) struck(c *client, s *Script) bool {
	p := t.open(c)
	if p == nil {
		return true
	}
	// Slabs at hand: how they are claimed is another matrix's matter.
	if ref, err := (treeStore{c}).Alloc([]byte("warm"), 1, treeClass.PayloadBytes(proto.Pair), false); err == nil {
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

// after is the life of a client that comes to what another one has left: a reader
// who has known the tree since before, or a writer who has not.
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

// strike does the operation that is going to be struck.
func (t *tree) strike(c *client, p *btree.Program, what int) {
	switch what {
	case treeDoesGet:
		t.do(c, p, treeGet, t.near)
	case treeDoesScan:
		t.scan(c, p)
	case treeDoesCollect:
		t.collect(c, p, false)
	case treeDoesDelete, treeDoesMerge, treeDoesShrink:
		t.do(c, p, treeDelete, t.near)
	case treeDoesPutLarge:
		t.values = t.values&^15 + 14 // the next one is large
		t.do(c, p, treePut, t.near)
	default:
		t.do(c, p, treePut, t.near)
	}
}
