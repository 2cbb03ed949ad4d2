package sim

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/anishathalye/porcupine"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// tree is the B-tree that the clients of a schedule work on if Options.Tree is set. They
// allocate and free the slabs of its nodes and values themselves.
//
// Checks at the end: the tree is well-formed, the history of each key is linearizable, each
// scan has found the keys that no client changes, and after a collection there is no object
// that is not in the tree.
type tree struct {
	w      *world // the world whose clients work on it
	root   btree.Ref
	mem    treeMemory      // the slabs of nodes and values
	hist   []treeEvent     // every operation
	shared []*btree.Shared // of all processes
	values int             // given out so far, so that none is written twice
	near   int             // key around which clients work
}

type treeOp uint8

const (
	treeGet treeOp = iota
	treePut
	treeAbsent // put if the key is absent
	treeDelete
)

func (o treeOp) String() string { return [...]string{"get", "put", "put-if-absent", "delete"}[o] }

// treeEvent is one operation on one key.
type treeEvent struct {
	client    int    // that called
	op        treeOp // what it called
	key       int    // number of the key
	call, ret int64  // virtual times
	in        int    // value written
	out       int    // value seen; 0 for none
	ok        bool   // found (get, delete), put (put-if-absent)
	result    result // done, not done or unknown
}

const (
	treeKeys = 48
	// Every fixedKeys-th key is never changed. Every scan must find it once.
	fixedKeys = 12
)

func treeKey(i int) []byte { return fmt.Appendf(nil, "key%04d", i) }

// treeValue returns a value that contains its number. Some values are too long for a leaf.
func treeValue(n int) []byte {
	b := fmt.Appendf(make([]byte, 0, 80), "%d ", n)
	pad := 66
	if n%16 == 15 {
		pad = 300
	}
	for len(b) < pad {
		b = append(b, byte('a'+n%26))
	}
	return b
}

// valueNumber returns n for treeValue(n), or 0.
func valueNumber(b []byte) (n int) {
	if _, err := fmt.Sscanf(string(b), "%d ", &n); err != nil || !bytes.Equal(b, treeValue(n)) {
		return 0
	}
	return n
}

// reset makes the tree of a new schedule.
func (t *tree) reset() {
	t.hist, t.shared, t.values, t.near = t.hist[:0], t.shared[:0], 0, 0
	t.mem.seedBlock()
	until := t.w.ch.choose(len(treePlan()))
	if sc := t.w.opt.Script; sc != nil && sc.tree != nil {
		until = treeSteps()[sc.tree.what]
	}
	sh, err := btree.Make(&t.mem, btree.Config{NodeBytes: treeNodeBytes, Staged: t.w.opt.Staged})
	if err != nil {
		panic(err)
	}
	t.root = sh.Root()
	p := btree.NewProgram(sh, &t.mem)
	for i := 0; i < treeKeys; i += fixedKeys {
		t.seed(p, treeStep{treePut, i})
	}
	for _, s := range treePlan()[:until] {
		t.seed(p, s)
	}
	t.near = treePlan()[until].key
	t.mem.flush()
}

// seed does one operation before the schedule begins.
func (t *tree) seed(p *btree.Program, s treeStep) {
	e := treeEvent{client: -1, op: s.op, key: s.key, call: -1, ret: -1, result: okResult, ok: true}
	e.call, e.ret = int64(len(t.hist))-1000, int64(len(t.hist))-1000
	var err error
	if s.op == treePut {
		if t.values++; t.values%16 == 15 {
			t.values++ // seeds are inline
		}
		e.in = t.values
		_, err = p.Put(treeKey(s.key), treeValue(e.in), btree.Cond{})
	} else {
		err = p.Delete(treeKey(s.key), btree.Cond{})
	}
	if err != nil {
		panic(fmt.Sprintf("seeding %v: %v", s, err))
	}
	t.hist = append(t.hist, e)
}

// treeStore is the btree.Store of a client: each call is a call of the client, with a deadline
// of its own, and a new session if the last one has ended.
type treeStore struct{ c *client }

// call begins a call, done ends it. A process that was killed does nothing more, not even while
// its stack unwinds.
func (s treeStore) call(k opKind) *client {
	c := s.c
	if c.killed {
		panic(killedError{})
	}
	if c.session == 0 || c.ended {
		c.openSession()
	}
	c.enter()
	c.doing = k
	return c
}

// Begin begins an operation, which has made no object yet.
func (s treeStore) Begin() { s.c.bound = 0 }

// change is call for a call that may write a reference to an object of the operation.
func (s treeStore) change(k opKind) (*client, error) {
	c := s.c
	// Time passes between two calls, in which the session may end.
	switch d := c.dawdles; {
	case d > 0 && c.bound != 0:
		c.dawdles = 0
		c.sleep(d)
	case c.w.ch.choose(64) == 63:
		c.sleep(int64(1+c.w.ch.choose(200)) * step)
	}
	if over := c.ended || c.session == 0 || c.serial != c.bound; c.bound != 0 && over {
		return nil, errEnded
	}
	s.call(k)
	if c.w.opt.Staged {
		c.lendShadows()
	}
	return c, nil
}

func (s treeStore) done(err error) error {
	s.c.leave()
	s.c.w.count(s.c.doing, err)
	return err
}

func (s treeStore) Read(ref btree.Ref, dst []byte) ([]byte, error) {
	out, _, err := s.call(opRead).lane.Read(ref, dst)
	return out, s.done(err)
}

func (s treeStore) View(ref btree.Ref, fn func(payload []byte) error) error {
	b, _, err := s.call(opRead).lane.View(ref)
	if err = s.done(err); err == nil {
		err = fn(b)
	}
	return err
}

func (s treeStore) ReadMany(refs []btree.Ref, fn func(i int, payload []byte, err error)) error {
	return s.done(s.call(opRead).lane.ReadMany(refs, func(i int, payload []byte, _ slab.Info, err error) { fn(i, payload, err) }))
}

func (s treeStore) Update(ref btree.Ref, f func(old []byte) ([]byte, error)) error {
	c, err := s.change(opUpdate)
	if err != nil {
		return err
	}
	_, err = c.lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return f(old) })
	return s.done(err)
}

func (s treeStore) Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (btree.Ref, error) {
	c, err := s.change(opBirth)
	if err != nil {
		return btree.Ref{}, err
	}
	want := alloc.Want{Kind: c.w.kind(), Capacity: capacity, Replicas: c.w.d.replicas, Durable: c.w.opt.Durable, Tag: tag}
	if writeOnce {
		want.Kind = proto.Single
	}
	err = c.allocator()
	var ref btree.Ref
	if err == nil {
		if ref, err = c.alloc.Alloc(payload, want); err == nil {
			c.bound = c.serial
		}
	}
	return ref, s.done(err)
}

func (s treeStore) Free(ref btree.Ref) error { return s.free(ref, 0) }

// free frees an object, at a version unless that is 0.
func (s treeStore) free(ref btree.Ref, version uint64) error {
	c := s.call(opFree)
	err := c.allocator()
	if err == nil && version == 0 {
		_, _, err = c.alloc.Free(ref)
	} else if err == nil {
		_, _, err = c.alloc.FreeVersion(ref, version)
	}
	return s.done(err)
}

// open opens the tree for a process, with a cache of its own.
func (t *tree) open(c *client) *btree.Program {
	cache := [...]int{64 << 10, 64 << 10, 8 << 10, -1}[t.w.ch.choose(4)]
	for {
		sh, err := btree.Attach(treeStore{c}, t.root, btree.Config{CacheBytes: cache, Staged: t.w.opt.Staged})
		if err == nil {
			t.shared = append(t.shared, sh)
			return btree.NewProgram(sh, treeStore{c})
		}
		if !t.w.notDone(err) {
			t.w.fail("unexpected error", fmt.Sprintf("client %d opens the tree: %v", c.id, err))
			return nil
		}
	}
}

// work is the program of a client with a tree.
func (t *tree) work(c *client) { t.workOn(c, t.open(c)) }

func (t *tree) workOn(c *client, p *btree.Program) {
	for ; p != nil && c.left > 0 && t.w.failed == nil; c.left-- {
		t.operate(c, p)
		if t.w.ch.choose(4) == 1 {
			c.sleep(int64(1+t.w.ch.choose(40)) * step)
		}
	}
	if c.session != 0 && !c.ended {
		c.end("closed")
	}
}

// operate does a random operation, mostly on keys near those of the other clients.
func (t *tree) operate(c *client, p *btree.Program) {
	w := t.w
	key := w.ch.choose(treeKeys)
	if w.ch.choose(4) > 0 {
		key = t.around(w.ch.choose(9) - 4)
	} else if key%fixedKeys == 0 {
		key++
	}
	what, seldom := w.ch.choose(16), 0
	if what == 1 {
		seldom = w.ch.choose(4)
	}
	switch {
	case what == 0:
		t.scan(c, p)
	case seldom == 1:
		t.collect(c, p, false)
	case seldom == 2:
		t.compact(c, p)
	case what < 5:
		t.do(c, p, treeGet, key)
	case what < 9:
		t.do(c, p, treePut, key)
	case what < 11:
		t.do(c, p, treeAbsent, key)
	default:
		t.do(c, p, treeDelete, key)
	}
}

// around returns a key at a distance from the one that clients work around, and not a fixed one.
func (t *tree) around(i int) int {
	key := (t.near + i + treeKeys) % treeKeys
	if key%fixedKeys == 0 {
		key++
	}
	return key
}

// do does one operation on a key and records it.
func (t *tree) do(c *client, p *btree.Program, op treeOp, key int) {
	w := t.w
	t.values++
	at := len(t.hist)
	t.hist = append(t.hist, treeEvent{client: c.id, op: op, key: key, in: t.values, call: int64(w.steps), ret: never, result: unknownResult})
	w.logf("client %d: %v %s value %d", c.id, op, treeKey(key), t.values)
	var err error
	out, ok := 0, true
	switch op {
	case treeGet:
		var b []byte
		if b, _, err = p.Get(treeKey(key), nil); err == nil {
			if out = valueNumber(b); out == 0 {
				w.fail("damaged value", fmt.Sprintf("client %d: %s is %q", c.id, treeKey(key), b))
			}
		}
	case treePut:
		_, err = p.Put(treeKey(key), treeValue(t.values), btree.Cond{})
	case treeAbsent:
		_, err = p.Put(treeKey(key), treeValue(t.values), btree.IfAbsent())
	case treeDelete:
		err = p.Delete(treeKey(key), btree.Cond{})
	}
	if errors.Is(err, btree.ErrNoKey) || errors.Is(err, btree.ErrKeyExists) {
		ok, err = false, nil
	}
	e := &t.hist[at]
	switch {
	case err == nil:
		e.result, e.ret, e.out, e.ok = okResult, int64(w.steps), out, ok
	case errors.Is(err, slab.ErrUnknown):
	case w.notDone(err), errors.Is(err, alloc.ErrNoSpace):
		e.result = notDoneResult
	default:
		w.fail("unexpected error", fmt.Sprintf("client %d %v %s: %v", c.id, op, treeKey(key), err))
	}
	w.logf("client %d: %v %s: %v value %d ok %v (%v)", c.id, op, treeKey(key), e.result, e.out, e.ok, err)
	w.mix(uint64(e.result)<<40 ^ uint64(e.out))
}

// compact fills the leaves of the whole tree.
func (t *tree) compact(c *client, p *btree.Program) {
	w := t.w
	var from []byte
	for {
		next, done, err := p.Compact(from, 100)
		w.logf("client %d: compact from %q: %+v %v", c.id, from, done, err)
		switch {
		case err == nil && next != nil:
			from = next
			continue
		case err != nil && !w.notDone(err) && !errors.Is(err, slab.ErrUnknown) && !errors.Is(err, alloc.ErrNoSpace):
			w.fail("unexpected error", fmt.Sprintf("client %d compacts: %v", c.id, err))
		}
		return
	}
}

// scan scans the whole tree, in a random direction.
func (t *tree) scan(c *client, p *btree.Program) {
	w := t.w
	reverse := w.ch.choose(2) == 1
	last, fixed := "", 0
	err := p.Scan(btree.Range{Reverse: reverse}, func(k, v []byte, _ uint64) bool {
		if s := string(k); last != "" && (s < last) != reverse || s == last {
			w.fail("scan out of order", fmt.Sprintf("client %d: %q after %q", c.id, s, last))
		}
		last = string(k)
		var i int
		if _, err := fmt.Sscanf(last, "key%04d", &i); err != nil || valueNumber(v) == 0 {
			w.fail("damaged entry", fmt.Sprintf("client %d: %q has %q", c.id, k, v))
		}
		if i%fixedKeys == 0 {
			fixed++
		}
		return w.failed == nil
	})
	w.logf("client %d: scan: %v", c.id, err)
	switch {
	case err != nil && !w.notDone(err):
		w.fail("unexpected error", fmt.Sprintf("client %d scans: %v", c.id, err))
	case err == nil && w.failed == nil && fixed != treeKeys/fixedKeys:
		w.fail("a scan left something out", fmt.Sprintf("client %d: %d of %d keys that no client changes", c.id, fixed, treeKeys/fixedKeys))
	}
}

// collect frees the orphans of dead sessions, as kv.Collect does. alone means that no other
// client has a session; then this client may have the id of a dead one. After an error some may be left.
func (t *tree) collect(c *client, p *btree.Program, alone bool) (freed int, err error) {
	w := t.w
	if k := &w.mirror; !k.table.open || !w.fab.Nodes()[k.table.node[0]].Up {
		return 0, slab.ErrUnavailable
	}
	orphans, _, err := slab.Orphans(&treeSurvey{t, c, p, alone})
	w.logf("client %d: collect, %d orphans, %v", c.id, len(orphans), err)
	for _, o := range orphans {
		if err != nil {
			break
		}
		w.logf("client %d: collects %v", c.id, o.Ref)
		if err = (treeStore{c}).free(o.Ref, o.Version); err == nil {
			w.stats.Tree.Strays++
			freed++
		} else if errors.Is(err, slab.ErrFreed) || errors.Is(err, slab.ErrConflict) {
			err = nil
		}
	}
	if err != nil && !w.notDone(err) && !errors.Is(err, slab.ErrUnknown) {
		w.fail("unexpected error", fmt.Sprintf("client %d collects: %v", c.id, err))
	}
	return freed, err
}

// treeSurvey is the slab.Survey of the schedule's tree.
type treeSurvey struct {
	t     *tree
	c     *client
	p     *btree.Program
	alone bool
}

// pause lets time pass between two steps of a survey.
func (s *treeSurvey) pause() {
	if most := [...]int{1, 1, 20, 300}[s.t.w.ch.choose(4)]; !s.alone && most > 1 {
		s.c.sleep(int64(1+s.t.w.ch.choose(most)) * step)
	}
}

func (s *treeSurvey) Objects(saw func(slab.Seen)) error {
	s.t.mem.objects(func(ref btree.Ref, h proto.ImageHeader) {
		saw(slab.Seen{Ref: ref, Tag: h.Tag, Bytes: h.Length, Version: h.Version, Writer: h.Writer.Session()})
	})
	s.pause()
	return nil
}

func (s *treeSurvey) Sessions() (func(uint32) slab.SessionState, error) {
	if s.alone {
		return func(uint32) slab.SessionState { return slab.SessionGone }, nil
	}
	states, err := s.t.w.mach.sessionStates(s.c)
	s.pause()
	return states, err
}

func (s *treeSurvey) Named(met func(proto.Ref)) (bool, error) {
	err := s.p.Walk(func(o btree.Object) error {
		met(o.Ref)
		return nil
	})
	s.pause()
	return err == nil, err
}

// tidy has a client of the healed cluster collect the orphans.
func (t *tree) tidy() {
	c := &t.w.clients[0]
	c.start(func() {
		// Controllers may move the primary at this moment: a collection that is cut short is repeated.
		for range 10 {
			if p := t.open(c); p != nil {
				if _, err := t.collect(c, p, true); err == nil {
					break
				}
			}
			c.sleep(100 * step)
		}
		c.end("closed")
	})
	t.w.until(func() bool { return t.w.quiet() })
}

// check checks the structure of the tree and the histories of its keys.
func (t *tree) check() {
	w := t.w
	for _, sh := range t.shared {
		w.stats.Tree.add(sh.Changes())
	}
	left := map[btree.Ref]bool{}
	t.mem.objects(func(ref btree.Ref, h proto.ImageHeader) { left[ref] = true })
	rep, err := btree.Check(&t.mem, t.root, func(ref btree.Ref, tag uint32) { delete(left, ref) })
	if err != nil {
		w.fail("damaged tree", err.Error())
		return
	}
	if len(left) > 0 {
		w.fail("objects of no tree", fmt.Sprintf("%d left after a collection", len(left)))
		return
	}
	w.mix(uint64(rep.Keys))
	sh, err := btree.Attach(&t.mem, t.root, btree.Config{CacheBytes: -1, ReadOnly: true, Staged: t.w.opt.Staged})
	if err != nil {
		w.fail("damaged tree", err.Error())
		return
	}
	p, keys := btree.NewProgram(sh, &t.mem), 0
	for i := range treeKeys {
		e := treeEvent{client: controllerRow, op: treeGet, key: i, call: never - 1, ret: never, result: okResult}
		b, _, err := p.Get(treeKey(i), nil)
		switch {
		case err == nil:
			e.ok, e.out = true, valueNumber(b)
			keys++
		case !errors.Is(err, btree.ErrNoKey):
			w.fail("damaged tree", err.Error())
			return
		}
		t.hist = append(t.hist, e)
	}
	if keys != rep.Keys {
		w.fail("damaged tree", fmt.Sprintf("%d keys are found, %d are there", keys, rep.Keys))
	}
	t.linear()
}

// linear checks the history of each key, a register that may be empty.
func (t *tree) linear() {
	var ops [treeKeys][]porcupine.Operation
	for i := range t.hist {
		e := &t.hist[i]
		if e.result == notDoneResult || e.op == treeGet && e.result != okResult || t.soft(e) {
			continue
		}
		ops[e.key] = append(ops[e.key], porcupine.Operation{ClientId: e.client + 1, Input: e, Call: e.call, Return: e.ret})
	}
	for key := range ops {
		switch porcupine.CheckOperationsTimeout(treeModel, ops[key], porcupineTimeout) {
		case porcupine.Illegal:
			t.w.fail("key not linearizable", fmt.Sprintf("%s: %s", treeKey(key), t.story(key)))
		case porcupine.Unknown:
			t.w.fail("porcupine: no answer", fmt.Sprintf("%s: %d operations in %v", treeKey(key), len(ops[key]), porcupineTimeout))
		}
	}
}

// soft reports whether an operation's answer comes from a READ alone, of memory that has lost
// power since: the bytes that it saw may have been lost. Acknowledged writes must not be.
func (t *tree) soft(e *treeEvent) bool {
	k := &t.w.check
	return e.result == okResult && k.lost && e.call <= k.lostAt && (e.op == treeGet || !e.ok)
}

func (t *tree) story(key int) string {
	var b bytes.Buffer
	for i := range t.hist {
		if e := &t.hist[i]; e.key == key && e.result != notDoneResult {
			fmt.Fprintf(&b, "\n  client %d %v [%d,%d] %v in %d out %d ok %v", e.client, e.op, e.call, e.ret, e.result, e.in, e.out, e.ok)
		}
	}
	return b.String()
}

var treeModel = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(state, input, _ any) (bool, any) {
		s, e := state.(int), input.(*treeEvent)
		unknown := e.result != okResult
		switch e.op {
		case treeGet:
			return e.ok == (s != 0) && e.out == s, s
		case treePut:
			return true, e.in
		case treeDelete:
			return unknown || e.ok == (s != 0), 0
		}
		if s != 0 {
			return unknown || !e.ok, s
		}
		return unknown || e.ok, e.in
	},
	Equal: func(a, b any) bool { return a == b },
}

// TreeCoverage counts the changes of the structure of trees.
type TreeCoverage struct {
	Splits, SplitsAtKey, Grows, Merges, Shifts, Shrinks, Thawed, Unlinked, Posted uint64
	Strays                                                                        uint64 // collected
}

func (c *TreeCoverage) add(changes map[string]uint64) {
	for _, x := range []struct {
		n    *uint64
		name string
	}{{&c.Splits, "splits"}, {&c.SplitsAtKey, "splits_at_key"}, {&c.Grows, "grows"}, {&c.Merges, "merges"}, {&c.Shifts, "shifts"}, {&c.Shrinks, "shrinks"}, {&c.Thawed, "thawed"}, {&c.Unlinked, "unlinked"}, {&c.Posted, "posted"}} {
		*x.n += changes[x.name]
	}
}

// Add adds the counts of another run.
func (c *TreeCoverage) Add(o *TreeCoverage) {
	c.Splits, c.SplitsAtKey, c.Grows, c.Merges, c.Shifts, c.Shrinks = c.Splits+o.Splits, c.SplitsAtKey+o.SplitsAtKey, c.Grows+o.Grows, c.Merges+o.Merges, c.Shifts+o.Shifts, c.Shrinks+o.Shrinks
	c.Thawed, c.Unlinked, c.Posted, c.Strays = c.Thawed+o.Thawed, c.Unlinked+o.Unlinked, c.Posted+o.Posted, c.Strays+o.Strays
}
