package redis

import (
	"bytes"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// Commands of a pipeline that write fields and follow each other are executed together. Each hash is
// found, or made, once for all of them; then the fields are written, in their order; then it is looked
// once whether the writes to a hash count. That is the order of conn.within, for each command. A command whose
// key has another type, or whose writes do not count, is executed by itself. A missing hash is made.

// target is a hash or sorted set that commands of a run write to.
type target struct {
	key     []byte    // as the client has given it
	id      uint64    // whose fields are written
	r       record    // as it was found or made
	made    bool      // by this run
	alone   bool      // its commands are executed by themselves, because another command was faster
	err     error     // why it could not be made: the answer to its commands
	written []written // by all commands

	// Result of look.
	counts   bool            // all of written
	lost     map[string]bool // unless counts: fields whose writes do not count
	late     bool            // unless counts: look came too late to tell whether the other fields count
	lookErr  error           // of look: it is not known which writes count
	unharmed bool            // the owner is not condemned
}

// change is a command of a run.
type change struct {
	target int   // in conn.targets
	wrote  bool  // a field
	fresh  int   // fields that were not there
	sum    int64 // of HINCRBY
	err    error // of the first field that failed, and an unknown outcome of any
}

// aim finds the hash or sorted set of each command, whose first argument is the key, and makes those that are missing.
// It takes either the commands on the first key, if that exists, or the leading commands on keys that do not exist,
// and returns their number. (Keys that exist share nothing, and are best read while they are in the cache.)
func (c *conn) aim(batch []request, kind byte) (n int) {
	c.targets, c.changes = c.targets[:0], c.changes[:0]
	for _, r := range batch {
		key := c.p.words[r.from+1]
		at := len(c.targets) - 1
		for at >= 0 && !bytes.Equal(c.targets[at].key, key) {
			at--
		}
		if at < 0 {
			if at = len(c.targets); at > 0 && !c.targets[0].made {
				break
			}
			rec, again, err := c.find(key, kind)
			if again || err != nil || at > 0 && rec.kind != kindNone {
				break // for now, or for good
			}
			c.addTarget(key, &rec)
		}
		c.changes = append(c.changes, change{target: at})
	}
	c.makeTargets(kind)
	return len(c.changes)
}

// addTarget adds a target, in the memory of an earlier one.
func (c *conn) addTarget(key []byte, r *record) {
	if len(c.targets) == cap(c.targets) {
		c.targets = append(c.targets, target{})
	} else {
		c.targets = c.targets[:len(c.targets)+1]
	}
	t := &c.targets[len(c.targets)-1]
	*t = target{key: key, id: r.id, r: *r, made: r.kind == kindNone, written: t.written[:0]}
}

// live says whether the run writes to the target.
func (t *target) live() bool { return !t.alone && t.err == nil }

// makeTargets makes empty hashes or sorted sets, as establish does.
func (c *conn) makeTargets(kind byte) {
	if len(c.targets) == 0 || !c.targets[0].made {
		return
	}
	c.putEach(func(t *target, w *btree.Write) bool {
		if !t.made || !t.live() {
			return false
		}
		t.id = c.ids.take(c.s.random)
		o := owner{kind: kind, made: c.now, db: byte(c.db), key: t.key}
		*w = btree.Write{Key: appendID(w.Key, ownerFamily, t.id), Value: o.append(w.Value), Cond: btree.IfAbsent()}
		return true
	}, func(t *target, w *btree.Write) {
		if t.err = ignoreLost(w.Err); lost(w.Err) {
			t.alone, c.ids.left = true, 0 // the row meets another one
		}
	})
	c.putEach(func(t *target, w *btree.Write) bool {
		*w = btree.Write{Key: AppendKey(w.Key, c.db, t.key), Value: appendNewborn(w.Value, kind, 0, t.id), Cond: t.r.cond()}
		return t.made && t.live()
	}, func(t *target, w *btree.Write) {
		switch t.err = ignoreLost(w.Err); {
		case lost(w.Err):
			t.alone = true
			_ = c.s.tree.Delete(c.s.ctx, appendID(nil, ownerFamily, t.id))
		case w.Err == nil:
			if t.r.id != 0 {
				c.s.later(t.r.id)
			}
			t.r = record{newborn: kind, id: t.id, version: w.Version}
		}
	})
}

// putEach puts a record for each target for which fill makes one. fill appends to the key and the value.
func (c *conn) putEach(fill func(t *target, w *btree.Write) bool, done func(t *target, w *btree.Write)) {
	c.keys.reset()
	c.vals.reset()
	c.writes = c.writes[:0]
	var of []*target
	for i := range c.targets {
		t := &c.targets[i]
		w := btree.Write{Key: c.keys.b, Value: c.vals.b}
		if !fill(t, &w) {
			continue
		}
		c.keys.b, c.vals.b = w.Key, w.Value
		c.keys.end()
		c.vals.end()
		c.writes, of = append(c.writes, w), append(of, t)
	}
	keys, values := c.keys.all(), c.vals.all()
	for i := range c.writes {
		c.writes[i].Key, c.writes[i].Value = keys[i], values[i]
	}
	c.ask(func(i int, w *btree.Write) { done(of[i], w) })
}

// ask makes the writes of c.writes, also those behind one that fails.
func (c *conn) ask(answered func(i int, w *btree.Write)) {
	_, _ = c.runs(func(i int, w *btree.Write) error {
		answered(i, w)
		return nil
	})
}

// look says for each target whether what was written to it counts.
func (c *conn) look() {
	c.confirmTargets()
	for i := range c.targets {
		t := &c.targets[i]
		if !t.live() || t.counts || t.lookErr != nil {
			continue
		}
		if len(t.written) == 0 {
			if t.made {
				c.s.leave(c.s.reap(c.s.ctx, AppendKey(nil, c.db, t.key), t.id))
			}
			continue
		}
		if t.counts, t.lookErr = c.endures(t.key, &t.r, t.made, true); !t.counts && t.lookErr == nil {
			c.written = t.written
			t.lost, t.lookErr = c.uncounted(t.id)
			t.late = c.late()
		}
	}
}

// confirmTargets ends the birth of those that were made and written to. look goes on with those that it leaves.
func (c *conn) confirmTargets() {
	if !c.targets[0].made {
		return
	}
	c.keys.reset()
	var of []*target
	for i := range c.targets {
		if t := &c.targets[i]; t.made && len(t.written) > 0 {
			c.keys.b = appendID(c.keys.b, ownerFamily, t.id)
			c.keys.end()
			of = append(of, t)
		}
	}
	if len(of) == 0 {
		return
	}
	_ = c.s.tree.GetMany(c.s.ctx, c.keys.all(), func(i int, value []byte, _ uint64, err error) {
		o, bad := decodeOwner(value)
		of[i].unharmed = err == nil && bad == nil && !o.condemned
	})
	c.putEach(func(t *target, w *btree.Write) bool {
		*w = btree.Write{Key: AppendKey(w.Key, c.db, t.key), Value: appendFamily(w.Value, t.r.newborn, t.r.expiry, t.id), Cond: t.r.cond()}
		return t.unharmed
	}, func(t *target, w *btree.Write) {
		t.counts, t.lookErr = w.Err == nil, ignoreLost(w.Err)
	})
}

// verdict says whether what a command has written to some fields counts.
func (t *target) verdict(fields [][]byte, step int) (bool, error) {
	if t.counts || t.lookErr != nil {
		return t.counts, t.lookErr
	}
	for i := 0; i < len(fields); i += step {
		if t.lost[string(fields[i])] {
			return false, nil
		}
	}
	if t.late {
		return false, client.ErrUnknown
	}
	return true, nil
}

// conclude answers request i, which was part of a run and has written fields, every stepth of them one.
func (c *conn) conclude(i int, ch *change, fields [][]byte, step int, reply func()) {
	t := &c.targets[ch.target]
	c.did = progress{}
	if t.alone {
		c.single(i)
		return
	}
	err := errors.Join(t.err, ch.err)
	if ch.wrote {
		counts, lookErr := t.verdict(fields, step)
		if !counts && err == nil && lookErr == nil {
			c.single(i)
			return
		}
		if c.did.unsettled = true; counts {
			c.did.settle()
		}
		err = errors.Join(err, lookErr)
	}
	if err != nil {
		c.fail(c.explain(err))
		c.failed++
		return
	}
	reply()
}

// setting is a field that a run writes.
type setting struct {
	change int // in conn.changes
	field  []byte
	add    func(value []byte, version uint64, b []byte) ([]byte, error) // of HINCRBY
}

// setTogether executes HSET, HMSET and HINCRBY, as many of n as share something; 0: none.
func (c *conn) setTogether(i, n int) int {
	if n = c.aim(c.batch[i:i+n], kindHash); n == 0 {
		return 0
	}
	c.setAll(c.batch[i : i+n])
	c.look()
	for k := range n {
		r, ch := c.batch[i+k], &c.changes[k]
		c.conclude(i+k, ch, c.p.words[r.from+2:r.to], 2, func() {
			switch r.cmd.name {
			case "hset":
				c.integer(int64(ch.fresh))
			case "hmset":
				c.ok()
			default:
				c.integer(ch.sum)
			}
		})
	}
	return n
}

// setAll writes the fields of all commands, in their order.
func (c *conn) setAll(batch []request) {
	c.keys.reset()
	c.writes = c.writes[:0]
	c.settings = c.settings[:0]
	for k, r := range batch {
		ch, a := &c.changes[k], c.p.words[r.from:r.to]
		t := &c.targets[ch.target]
		if !t.live() {
			continue
		}
		for j := 2; j < len(a); j += 2 {
			s, w := setting{change: k, field: a[j]}, btree.Write{Value: a[j+1]}
			if r.cmd.name == "hincrby" {
				by, _ := parseInt(a[3])
				s.add = addToField(by, &ch.sum)
				w = btree.Write{Edit: func(old []byte, version uint64) ([]byte, bool, error) {
					b, err := s.add(old, version, nil)
					return b, false, err
				}}
			}
			c.keys.b = appendField(c.keys.b, t.id, a[j])
			c.keys.end()
			c.settings, c.writes = append(c.settings, s), append(c.writes, w)
		}
	}
	for i, key := range c.keys.all() {
		c.writes[i].Key = key
	}
	c.ask(func(i int, w *btree.Write) { c.wrote(&c.settings[i], w) })
}

// wrote notes the answer to the write of a field.
func (c *conn) wrote(s *setting, w *btree.Write) {
	ch := &c.changes[s.change]
	t := &c.targets[ch.target]
	made := w.Err == nil
	if errors.Is(w.Err, kv.ErrNoEdit) {
		c.written = t.written
		if made, w.Err = c.rewriteField(t.id, s.field, s.add); made {
			t.written = c.written
		}
	} else if made {
		t.written = append(t.written, written{s.field, w.Version, w.Base})
	}
	if ch.wrote = ch.wrote || made; made && w.Base == 0 {
		ch.fresh++
	}
	ch.failed(w.Err)
}

// failed records the error of a field. The fields behind it are written nevertheless, and an
// unknown outcome of one of them takes the place of an earlier error.
func (ch *change) failed(err error) {
	switch {
	case ch.err == nil:
		ch.err = err
	case errors.Is(err, client.ErrUnknown) && !errors.Is(ch.err, client.ErrUnknown):
		ch.err = errors.Join(ch.err, err)
	}
}

// isPlain says whether the arguments of a command on fields are valid, so that only what is stored can make it fail.
func (c *conn) isPlain(cmd *command, a [][]byte) bool {
	if len(a) < 4 || len(a)%2 != 0 || c.checkFields(a[2:], 2) != nil {
		return false
	}
	if cmd.name != "hincrby" {
		return true
	}
	_, ok := parseInt(a[len(a)-1])
	return ok && len(a) == 4
}

// placeTogether executes ZADDs, as setTogether does.
func (c *conn) placeTogether(i, n int) int {
	if n = c.aim(c.batch[i:i+n], kindZset); n == 0 {
		return 0
	}
	c.placeAll(c.batch[i : i+n])
	c.look()
	for k := range n {
		r, ch := c.batch[i+k], &c.changes[k]
		c.conclude(i+k, ch, c.p.words[r.from+3:r.to], 2, func() { c.integer(int64(ch.fresh)) })
	}
	return n
}

// placeAll gives the members of all commands their scores, in their order. A member that is named again waits
// for those before it.
func (c *conn) placeAll(batch []request) {
	c.placings = c.placings[:0]
	var err error // of those before, and then of all behind
	for k, r := range batch {
		ch, a := &c.changes[k], c.p.words[r.from:r.to]
		t := &c.targets[ch.target]
		if !t.live() {
			continue
		}
		for j := 2; j < len(a); j += 2 {
			score, _ := parseFloat(a[j])
			m := placing{id: t.id, member: a[j+1], asked: score, make: true, into: &t.written, change: k}
			if !c.addPlacing(m) {
				err = c.placeNow(err)
				c.addPlacing(m)
			}
		}
	}
	_ = c.placeNow(err)
}

// placeNow gives the members of c.placings their scores, unless there is an error already. It returns the error.
func (c *conn) placeNow(err error) error {
	if err == nil {
		err = c.place(c.placeable(), zaddFlags{})
	}
	for i := range c.placings {
		m := &c.placings[i]
		ch := &c.changes[m.change]
		if ch.wrote = ch.wrote || m.done && (m.added || m.changed); m.done && m.added {
			ch.fresh++
		}
		if !m.done {
			ch.err = err
		}
	}
	c.placings = c.placings[:0]
	return err
}

// isPlainZadd says whether a ZADD has no options and valid arguments, so that only what is stored can make it fail.
func (c *conn) isPlainZadd(a [][]byte) bool {
	if len(a) < 4 || len(a)%2 != 0 || c.checkFields(a[3:], 2) != nil {
		return false
	}
	for i := 2; i < len(a); i += 2 {
		if _, ok := parseFloat(a[i]); !ok {
			return false
		}
	}
	return true
}
