package redis

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// This file reads and changes records of keys, so that commands on one key are atomic.

// maxTries bounds how often a command starts again because others changed what it
// had read: every failed try means that another command made progress.
const maxTries = 1000

var (
	// errLeave of a callback of edit: the record stays as it is.
	errLeave = errors.New("leave it")
	// errMark of a callback of Edit: the record is a mark of a move, or newborn.
	errMark = errors.New("the key is being renamed or made")
	// errRemove of a callback of edit: remove the key.
	errRemove = errors.New("remove it")
)

// lost says that a condition failed because another command had changed the record.
func lost(err error) bool {
	return err != nil && !errors.Is(err, client.ErrUnknown) &&
		(errors.Is(err, btree.ErrConflict) || errors.Is(err, btree.ErrKeyExists) || errors.Is(err, btree.ErrNoKey))
}

// pause waits a random time, so that gateways that change the same key do not collide again.
func pause(try int) {
	if try >= 4 {
		time.Sleep(time.Duration(rand.IntN(min(1000, 50*try))+1) * time.Microsecond)
	}
}

// load reads the record of a key, and sets c.key to its key in the tree. The record's value is valid
// until the next load.
func (c *conn) load(key []byte) (record, error) {
	c.key = AppendKey(c.key[:0], c.db, key)
	return c.reload()
}

// reload reads the record at c.key. It first completes a move whose mark is there, and clears the
// dying flag that another gateway has set because it found the hash empty.
func (c *conn) reload() (r record, err error) {
	for try := range maxTries {
		raw, version, err := c.s.tree.GetVersion(c.s.ctx, c.key, c.raw[:0])
		if err != nil {
			if errors.Is(err, btree.ErrNoKey) {
				return record{}, nil
			}
			return r, err
		}
		c.raw = raw
		if r, err = decode(raw, version, c.now); err != nil {
			return r, err
		}
		switch {
		case r.mark != 0:
			err = c.s.settle(c.s.ctx, c.key, &r)
		case r.dying:
			// Clear the flag: the gateway that has set it would otherwise remove this record.
			raw[0] &^= flagDies
			_, err = c.s.tree.PutIf(c.s.ctx, c.key, raw, r.cond())
			err = ignoreLost(err)
		default:
			if r.kind == kindNone && r.newborn == 0 {
				c.s.expired(c.key, r.id)
			}
			c.kept(c.key, &r)
			return r, nil
		}
		if err != nil {
			return r, err
		}
		pause(try)
	}
	return r, errContended
}

// is refuses a key of another type.
func (r *record) is(kind byte) error {
	if r.kind != kindNone && r.kind != kind {
		return errWrongType
	}
	return nil
}

// ttl is the expiry of the key; 0: none, or the key is absent.
func (r *record) ttl() int64 {
	if r.kind == kindNone {
		return 0
	}
	return r.expiry
}

// edit changes a key atomically: f appends the record that replaces r to b, or returns errLeave or
// errRemove. f runs again when another command changed the record first.
//
// Linearizes at: the PutIf or DeleteIf; where f leaves or refuses, at the read.
func (c *conn) edit(key []byte, f func(r *record, b []byte) ([]byte, error)) error {
	lock := c.s.stripe(key)
	lock.Lock()
	defer lock.Unlock()
	for try := range maxTries {
		r, err := c.load(key)
		if err != nil {
			return err
		}
		b, err := f(&r, c.enc[:0])
		if r.newborn != 0 && (err == nil || err == errRemove) {
			// It may be confirmed at any time: then it is there.
			if err := c.decide(&r); err != nil {
				return err
			}
			pause(try)
			continue
		}
		switch {
		case err == nil:
			c.enc = b
			if _, err = c.s.tree.PutIf(c.s.ctx, c.key, b, r.cond()); err == nil {
				c.s.noteTime(b)
			}
		case err == errRemove && r.version == 0, err == errLeave:
			return nil
		case err == errRemove:
			err = c.s.tree.DeleteIf(c.s.ctx, c.key, r.cond())
		default:
			return err
		}
		if !lost(err) {
			if err == nil && r.id != 0 && !keepsID(b, r.id) {
				c.s.later(r.id)
			}
			return err
		}
		pause(try)
	}
	return errContended
}

// runs makes the writes of c.writes in order; those that follow each other in one leaf together. It calls
// answered for each one, with its answer in Err: see kv.Tree.WriteRun. It stops at the first error of
// answered, and returns the number of that write.
func (c *conn) runs(answered func(i int, w *btree.Write) error) (at int, err error) {
	defer func() { clear(c.writes) }() // of what they lead to
	for at < len(c.writes) {
		n, err := c.s.tree.WriteRun(c.s.ctx, c.writes[at:])
		if err != nil {
			n, c.writes[at].Err = 1, err
		}
		for range n {
			if err := answered(at, &c.writes[at]); err != nil {
				return at, err
			}
			at++
		}
	}
	return at, nil
}

// each makes the writes of c.writes, which are in the order of their keys: those of one key in their order, and many leaves together. It
// calls answered as runs does.
func (c *conn) each(answered func(i int, w *btree.Write)) {
	all := c.writes
	defer func() { clear(all) }()
	_ = c.s.tree.WriteEach(c.s.ctx, all) // an error leaves all writes to runs
	c.unmade = c.unmade[:0]
	for i := range all {
		if all[i].Alone {
			c.unmade = append(c.unmade, i)
		} else {
			answered(i, &all[i])
		}
	}
	for k, i := range c.unmade {
		all[k] = all[i]
	}
	c.writes = all[:len(c.unmade)]
	_, _ = c.runs(func(k int, w *btree.Write) error {
		answered(c.unmade[k], w)
		return nil
	})
}

// shortBytes is what stands in a leaf beside all but the longest keys: with no more it
// is worth trying to change a value where it is.
const shortBytes = 200

// amendment is a change of a record in its leaf: in one trip to the tree instead of two, and together with
// what other connections do to the same leaf.
type amendment struct {
	f    func(r *record, b []byte) ([]byte, error) // as in conn.edit
	edit func(old []byte, version uint64) ([]byte, bool, error)
	now  int64  // ms since 1970
	next []byte // the record that replaces the old one; its memory is used again
	id   uint64 // that the old record had
	gone bool   // it is removed
}

// init binds the callbacks once, so that an amendment allocates nothing.
func (m *amendment) init(f func(r *record, b []byte) ([]byte, error)) { m.f, m.edit = f, m.run }

// run is the Edit of an amendment. It may run on another goroutine, while that of the connection waits.
func (m *amendment) run(old []byte, version uint64) ([]byte, bool, error) {
	var r record
	var err error
	if version != 0 {
		if r, err = decode(old, version, m.now); err != nil {
			return nil, false, err
		}
		if r.mark != 0 || r.newborn != 0 {
			return nil, false, errMark
		}
	}
	m.id = r.id
	next, err := m.f(&r, m.next[:0])
	m.gone = err == errRemove
	switch {
	case m.gone && version == 0:
		return nil, false, errLeave
	case m.gone:
		return nil, true, nil
	case err == nil:
		m.next = next
	}
	return next, false, err
}

// amend is edit for values that are most likely short.
func (c *conn) amend(m *amendment, key []byte) error {
	c.key = AppendKey(c.key[:0], c.db, key)
	_, err := c.s.tree.EditVersion(c.s.ctx, c.key, m.edit)
	return c.amended(m, key, err)
}

// amended ends an amendment that had this answer from the tree.
func (c *conn) amended(m *amendment, key []byte, err error) error {
	switch {
	case errors.Is(err, kv.ErrNoEdit), err == errMark:
		return c.edit(key, m.f)
	case err == errLeave:
		return nil
	case err != nil:
		return err
	}
	if !m.gone {
		c.s.noteTime(m.next)
	}
	if m.id != 0 && (m.gone || !keepsID(m.next, m.id)) {
		c.s.later(m.id)
	}
	return nil
}

// keepsID says whether a record still names an id.
func keepsID(b []byte, id uint64) bool {
	return len(b) > idBytes && b[0]&kindMask != kindString && binary.BigEndian.Uint64(b[len(b)-idBytes:]) == id
}

// remove removes a key, with its fields; false if there was none.
func (c *conn) remove(key []byte, lazy bool) (bool, error) {
	for try := range maxTries {
		r, err := c.load(key)
		if err != nil || r.kind == kindNone {
			return false, err
		}
		err = c.s.tree.DeleteIf(c.s.ctx, c.key, r.cond())
		if err == nil && r.id != 0 {
			if lazy {
				c.s.later(r.id)
			} else {
				c.s.leave(c.s.drop(c.s.ctx, r.id))
			}
		}
		if !lost(err) {
			return true, err
		}
		pause(try)
	}
	return false, errContended
}

// family finds the hash or sorted set at a key, for reading; id 0 if there is none.
func (c *conn) family(key []byte, kind byte) (uint64, error) {
	r, err := c.load(key)
	if err == nil {
		err = r.is(kind)
	}
	if err != nil || r.kind == kindNone {
		c.misses++
		return 0, err
	}
	c.hits++
	return r.id, nil
}

// read runs f on the id of the hash or sorted set at a key, 0 if there is none. f writes the
// reply and says whether the reply relies on a field that f did not find. Such a field may
// have been removed with the id, after the key had been given another id: then read
// discards the reply and runs f again.
//
// Linearizes at: the read of the key's record, or a read of a field by f.
func (c *conn) read(key []byte, kind byte, f func(id uint64) (missed bool, err error)) error {
	mark := len(c.out)
	for try := range maxTries {
		id, err := c.family(key, kind)
		if err != nil {
			return err
		}
		missed, err := f(id)
		if err != nil || !missed || id == 0 {
			return err
		}
		if intact, err := c.s.alive(c.s.ctx, id); err != nil || intact {
			return err
		}
		c.out = c.out[:mark]
		c.hits--
		pause(try)
	}
	return errContended
}

// effect is what a command has done to the fields of an id.
type effect uint8

const (
	effectNone   effect = iota // nothing; the reply relies only on fields that are there
	effectMissed               // nothing; the reply relies on a field that is not there
	effectWrote
)

// wroteIf is effectWrote or effectNone.
func wroteIf(wrote bool) effect {
	if wrote {
		return effectWrote
	}
	return effectNone
}

// within runs f on the id of the hash or sorted set at a key. If there is none it makes one,
// where create is set, and otherwise runs f with id 0. f runs again if the id ended before
// what f wrote counted, or before f missed a field.
func (c *conn) within(key []byte, kind byte, create bool, f func(id uint64) (effect, error)) error {
	for try := range maxTries {
		r, again, err := c.find(key, kind)
		if err != nil {
			return err
		}
		if again {
			pause(try)
			continue
		}
		made := r.kind == kindNone
		if made {
			if !create {
				_, err = f(0)
				return err
			}
			if err = c.establish(key, kind, &r); lost(err) {
				pause(try)
				continue
			} else if err != nil {
				return err
			}
		}
		c.written = c.written[:0]
		did, err := f(r.id)
		if made && did != effectWrote {
			c.s.leave(c.s.reap(c.s.ctx, AppendKey(nil, c.db, key), r.id))
			return err
		}
		if did == effectNone || did == effectMissed && err != nil {
			return err
		}
		// From here on others may see what f wrote, until it is known that it does not count.
		c.did.unsettled = c.did.unsettled || did == effectWrote
		ok, lookErr := c.checkCounts(key, &r, made, did == effectWrote)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		if ok && did == effectWrote {
			c.did.settle()
		}
		if ok || err != nil {
			return err
		}
		pause(try)
	}
	return errContended
}

// find loads the record of a key that may be a hash or sorted set of a kind, or absent. again: the record was
// newborn and has been decided; only its maker writes to it before that.
func (c *conn) find(key []byte, kind byte) (r record, again bool, err error) {
	if r, err = c.load(key); err == nil {
		err = r.is(kind)
	}
	if err != nil || r.newborn == 0 {
		return r, false, err
	}
	err = c.decide(&r)
	return r, err == nil, err
}

// checkCounts says whether the writes of the present command to the id of r, or its misses there,
// count: the id had not ended by then. made: the command has made the id.
func (c *conn) checkCounts(key []byte, r *record, made, wrote bool) (ok bool, err error) {
	if ok, err = c.endures(key, r, made, wrote); ok || err != nil || !wrote {
		return ok, err
	}
	gone, err := c.uncounted(r.id)
	if err != nil || len(gone) > 0 {
		return false, err
	}
	if c.late() {
		return false, client.ErrUnknown
	}
	return true, nil
}

// endures says whether the id of r has not ended before what the present command has written, or missed.
func (c *conn) endures(key []byte, r *record, made, wrote bool) (ok bool, err error) {
	switch {
	case wrote && made:
		if ok, err = c.confirm(key, r); err == errCondemned {
			err = nil
		}
	case wrote:
		ok, err = c.stands(key, r.id)
	}
	if !ok && err == nil {
		ok, err = c.s.alive(c.s.ctx, r.id)
	}
	return ok, err
}

// written is a field that the present command has written.
type written struct {
	field   []byte
	version uint64 // that the write gave the field
	base    uint64 // the version that the write replaced; 0: the field was not there
}

// uncounted are the fields of an id, which has ended, whose writes do not count as written before
// the end of the id. The command must write them again.
//
// A field that is not there counts: the command that ended the id has removed it, or a
// command that saw it. A field that is there does not: it was written behind the removal of
// the fields. It is removed, so that no reader sees it; but where this command has
// replaced what another had written, it stays. Otherwise that other writer would find its
// field gone, and take its write for counted.
//
// Fields of ended ids are removed when they are as old as the orphan age. A gateway that was
// suspended for as long (late) cannot tell of those that are not there, and answers that the outcome is unknown.
func (c *conn) uncounted(id uint64) (fields map[string]bool, err error) {
	for _, w := range merged(c.written) {
		_, version, err := c.field(id, w.field)
		if err != nil {
			return nil, err
		}
		if version == w.version && w.base == 0 {
			err = c.s.tree.DeleteIf(c.s.ctx, c.key2, btree.IfVersion(version))
			if lost(err) && errors.Is(err, btree.ErrNoKey) {
				continue // by a command that saw it
			}
		}
		if err != nil && !lost(err) {
			return nil, err
		}
		if version != 0 {
			if fields == nil {
				fields = map[string]bool{}
			}
			fields[string(w.field)] = true
		}
	}
	return fields, nil
}

// merged are the writes with those of one field, each of which replaced the one before, as
// one.
func merged(writes []written) []written {
	out := make([]written, 0, len(writes))
	last := map[string]int{} // of a field, in out
	for _, w := range writes {
		i, ok := last[string(w.field)]
		if ok && w.base == out[i].version {
			out[i].version = w.version
			continue
		}
		last[string(w.field)] = len(out)
		out = append(out, w)
	}
	return out
}

// late says whether the present command has taken so long that a sweep may have removed
// what it has left for a moment.
func (c *conn) late() bool {
	return c.s.clock().UnixMilli()-c.now >= c.s.cfg.OrphanAge.Milliseconds()/2
}
