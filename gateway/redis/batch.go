package redis

import (
	"bytes"
	"errors"

	"github.com/quarrystore/quarry/btree"
)

// arena holds many byte strings in one buffer.
type arena struct {
	b     []byte   // all strings, one after the other
	ends  []int    // offset in b at which each string ends
	parts [][]byte // the strings as slices of b, made by all
}

// reset empties the arena and keeps its memory.
func (a *arena) reset() { a.b, a.ends = a.b[:0], a.ends[:0] }

// end ends the string that has been appended to b.
func (a *arena) end() { a.ends = append(a.ends, len(a.b)) }

// all are the strings, valid until the arena changes.
func (a *arena) all() [][]byte {
	a.parts = a.parts[:0]
	from := 0
	for _, to := range a.ends {
		a.parts = append(a.parts, a.b[from:to:to])
		from = to
	}
	return a.parts
}

// fetched is the result for one key of many.
type fetched struct {
	from, to int        // in vals.b
	state    fetchState // what was found
	err      error      // of this key alone
}

type fetchState uint8

const (
	fetchPending fetchState = iota
	fetchNone
	fetchString
	fetchOther // another type
	fetchLate  // too large to be kept with all the others, or being renamed
	fetchFailed
)

// maxTogetherBytes bounds the values that are kept to be answered in order.
const maxTogetherBytes = 1 << 20

// getMany reads the keys that have been put into c.keys.
func (c *conn) getMany() {
	keys := c.keys.all()
	c.vals.reset()
	c.got = c.got[:0]
	for range keys {
		c.got = append(c.got, fetched{})
	}
	err := c.s.tree.GetMany(c.s.ctx, keys, c.fetch)
	for i := range c.got {
		if g := &c.got[i]; g.state == fetchPending {
			g.state, g.err = fetchFailed, err
		}
	}
}

// take is the callback of GetMany.
func (c *conn) take(i int, value []byte, version uint64, err error) {
	g := &c.got[i]
	if errors.Is(err, btree.ErrNoKey) {
		g.state = fetchNone
		return
	}
	if err != nil {
		g.state, g.err = fetchFailed, err
		return
	}
	r, err := decode(value, version, c.now)
	c.kept(c.keys.parts[i], &r)
	switch {
	case err != nil:
		g.state, g.err = fetchFailed, err
	case r.mark != 0:
		g.state = fetchLate
	case r.kind == kindNone:
		g.state = fetchNone
		c.s.expired(c.keys.parts[i], r.id)
	case r.kind != kindString:
		g.state = fetchOther
	case len(c.vals.b)+len(r.value) > maxTogetherBytes:
		g.state = fetchLate
	default:
		g.state, g.from = fetchString, len(c.vals.b)
		c.vals.b = append(c.vals.b, r.value...)
		g.to = len(c.vals.b)
	}
}

// gets answers GETs that follow each other.
func (c *conn) gets(batch []request) {
	c.keys.reset()
	for _, r := range batch {
		c.keys.b = AppendKey(c.keys.b, c.db, c.p.words[r.from+1])
		c.keys.end()
	}
	c.getMany()
	for i := range batch {
		if len(c.out) > flushBytes && !c.flush() {
			c.quit = true
			return
		}
		mark := len(c.out)
		if err := c.answer(i, c.p.words[batch[i].from+1], false); err != nil {
			c.out = c.out[:mark]
			c.fail(c.explain(err))
			c.failed++
		}
	}
}

// answer answers with what was fetched of a key.
func (c *conn) answer(i int, key []byte, lenient bool) error {
	switch g := &c.got[i]; g.state {
	case fetchString:
		c.hits++
		c.bulk(c.vals.b[g.from:g.to])
	case fetchLate:
		r, err := c.load(key)
		switch {
		case err != nil:
			return err
		case r.kind == kindString:
			c.bulk(r.value)
		case r.kind != kindNone && !lenient:
			return errWrongType
		default:
			c.null()
		}
	case fetchOther:
		if !lenient {
			return errWrongType
		}
		c.null()
	case fetchFailed:
		return g.err
	default:
		c.misses++
		c.null()
	}
	return nil
}

// sets carries out plain SETs that follow each other, many at a time; those of one
// key in their order.
func (c *conn) sets(batch []request) {
	c.keys.reset()
	c.vals.reset()
	for _, r := range batch {
		c.pair(c.p.words[r.from+1], c.p.words[r.from+2])
	}
	for _, err := range c.putPairs() {
		if err != nil {
			c.fail(c.explain(err))
			c.failed++
		} else {
			c.ok()
		}
	}
}

// putPairs puts what pair has added. A key that is being renamed is put when that is done,
// unless a later pair has put it.
func (c *conn) putPairs() []error {
	keys, values := c.keys.all(), c.vals.all()
	errs := c.s.tree.PutManyIf(c.s.ctx, keys, values, unmarked)
	for i, err := range errs {
		if !lost(err) {
			continue
		}
		errs[i] = nil
		overwritten := false
		for j := i + 1; j < len(keys); j++ {
			overwritten = overwritten || errs[j] == nil && bytes.Equal(keys[j], keys[i])
		}
		if !overwritten {
			errs[i] = c.edit(keys[i][1:], func(_ *record, b []byte) ([]byte, error) { return append(b, values[i]...), nil })
		}
	}
	return errs
}

// unmarked is the condition of a write that does not read the record: no mark is lost.
var unmarked = btree.Unless(flagMark)

// pair adds a key and its value to what is to be put.
func (c *conn) pair(key, value []byte) {
	c.keys.b = AppendKey(c.keys.b, c.db, key)
	c.keys.end()
	c.vals.b = AppendString(c.vals.b, value)
	c.vals.end()
}

// mget answers with the values of many keys.
func mget(c *conn, a [][]byte) error {
	c.keys.reset()
	for _, key := range a[1:] {
		c.keys.b = AppendKey(c.keys.b, c.db, key)
		c.keys.end()
	}
	c.getMany()
	mark := len(c.out)
	c.array(len(a) - 1)
	for i, key := range a[1:] {
		if err := c.answer(i, key, true); err != nil {
			return err
		}
		if c.tooMuch(mark) {
			return errReply
		}
	}
	return nil
}

// mset puts all pairs together. The pairs are not atomic as a whole: after an error some of them may be there,
// which the progress of the command notes.
func mset(c *conn, a [][]byte) error {
	if len(a)%2 == 0 {
		return wrongArity("mset")
	}
	c.keys.reset()
	c.vals.reset()
	for i := 1; i < len(a); i += 2 {
		c.pair(a[i], a[i+1])
	}
	errs := c.putPairs()
	for _, err := range errs {
		c.did.part = c.did.part || err == nil
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.ok()
	return nil
}

// madeString is a string that MSETNX has put at a key of the tree, with this version.
type madeString struct {
	key     []byte // of the tree
	version uint64 // the record is taken back only while it has this version
}

// unmake removes the strings that a MSETNX has made. errContended where another command has
// changed or moved one: it stays, and the answer 0 would be wrong.
func (c *conn) unmake(done []madeString) (err error) {
	for _, m := range done {
		uerr := c.s.tree.DeleteIf(c.s.ctx, m.key, btree.IfVersion(m.version))
		c.did.part = c.did.part || uerr != nil
		if lost(uerr) {
			uerr = errContended
		}
		err = errors.Join(err, uerr)
	}
	return err
}

// makeString puts a string at a key that does not exist. lost(err) is true if it does.
func (c *conn) makeString(key, value []byte) (r record, version uint64, err error) {
	r, err = c.load(key)
	if err == nil && r.newborn != 0 {
		if err = c.decide(&r); err == nil {
			r, err = c.load(key)
		}
	}
	if err == nil && (r.kind != kindNone || r.newborn != 0) {
		err = btree.ErrKeyExists
	}
	if err != nil {
		return r, 0, err
	}
	c.enc = AppendString(c.enc[:0], value)
	version, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond())
	return r, version, err
}

// msetnx sets all keys or none, unless other commands interfere: it first looks whether all are
// absent, and if a key appears meanwhile, it removes what it has set.
func msetnx(c *conn, a [][]byte) error {
	if len(a)%2 == 0 {
		return wrongArity("msetnx")
	}
	for i := 1; i < len(a); i += 2 {
		r, err := c.load(a[i])
		if err != nil {
			return err
		}
		if r.kind != kindNone {
			c.integer(0)
			return nil
		}
	}
	var done []madeString
	set := map[string]bool{}
	for i := len(a) - 2; i > 0; i -= 2 { // of equal keys the last one counts
		if set[string(a[i])] {
			continue
		}
		set[string(a[i])] = true
		r, version, err := c.makeString(a[i], a[i+1])
		if err != nil {
			uerr := c.unmake(done)
			if uerr == nil && lost(err) {
				c.integer(0)
				return nil
			}
			return errors.Join(ignoreLost(err), uerr)
		}
		if r.id != 0 {
			c.s.later(r.id)
		}
		done = append(done, madeString{key: append([]byte(nil), c.key...), version: version})
	}
	c.integer(1)
	return nil
}
