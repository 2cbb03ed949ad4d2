package resp

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// maxTries bounds how often a command starts again because others changed what it
// had read: every try means that somebody else got something done.
const maxTries = 1000

var (
	// errLeave of a callback of edit: all is as it should be.
	errLeave = errors.New("leave it")
	// errRemove of a callback of edit: remove the key.
	errRemove = errors.New("remove it")
)

// lost says that others were faster: what a condition was about has changed.
func lost(err error) bool {
	return err != nil && !errors.Is(err, client.ErrUnknown) &&
		(errors.Is(err, btree.ErrConflict) || errors.Is(err, btree.ErrKeyExists) || errors.Is(err, btree.ErrNoKey))
}

// pause keeps gateways that fight over a key from doing so in step.
func pause(try int) {
	if try >= 4 {
		time.Sleep(time.Duration(rand.IntN(min(1000, 50*try))+1) * time.Microsecond)
	}
}

// load reads the record of a key; c.key is its key in the tree. The value is good
// until the next load.
func (c *conn) load(key []byte) (record, error) {
	c.key = AppendKey(c.key[:0], c.db, key)
	return c.reload()
}

// reload reads the record at c.key.
func (c *conn) reload() (r record, err error) {
	raw, version, err := c.s.tree.GetVersion(c.s.ctx, c.key, c.raw[:0])
	if err != nil {
		if errors.Is(err, btree.ErrNoKey) {
			return record{}, nil
		}
		return r, err
	}
	c.raw = raw
	if r, err = decode(raw, version, c.now); err == nil && r.kind == kindNone {
		c.s.expired(c.key, r.id)
	}
	return r, err
}

// is refuses a key of another type.
func (r *record) is(kind byte) error {
	if r.kind != kindNone && r.kind != kind {
		return errWrongType
	}
	return nil
}

// ttl is the expiry that a change of the key keeps.
func (r *record) ttl() int64 {
	if r.kind == kindNone {
		return 0
	}
	return r.expiry
}

// edit changes a key atomically: f appends the record that follows r to b, or says
// errLeave or errRemove. f runs again when others were faster.
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

// shortBytes is what stands in a leaf beside all but the longest keys: with no more it
// is worth trying to change a value where it is.
const shortBytes = 200

// amend is edit for values that are most likely short: in one trip to the tree
// instead of two, and together with what other connections do to the same leaf.
func (c *conn) amend(key []byte, f func(r *record, b []byte) ([]byte, error)) error {
	c.key = AppendKey(c.key[:0], c.db, key)
	var id uint64 // that the record had
	var b []byte
	err := c.s.tree.Edit(c.s.ctx, c.key, func(old []byte, version uint64) ([]byte, bool, error) {
		var r record
		var err error
		if b = nil; version != 0 {
			if r, err = decode(old, version, c.now); err != nil {
				return nil, false, err
			}
		}
		id = r.id
		next, err := f(&r, c.enc[:0])
		switch {
		case err == errRemove && version == 0:
			err = errLeave
		case err == errRemove:
			return nil, true, nil
		case err == nil:
			b, c.enc = next, next
		}
		return next, false, err
	})
	switch {
	case errors.Is(err, kv.ErrNoEdit):
		return c.edit(key, f)
	case err == errLeave:
		return nil
	case err != nil:
		return err
	}
	if b != nil {
		c.s.noteTime(b)
	}
	if id != 0 && !keepsID(b, id) {
		c.s.later(id)
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
				err = c.s.drop(c.s.ctx, r.id)
			}
			c.partly = true
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

// within runs f on the hash or sorted set at a key, which it makes if it is not
// there and create is set, and sees to it that what f wrote counts. f runs again if
// it did not, and says whether it wrote.
func (c *conn) within(key []byte, kind byte, create bool, f func(id uint64) (wrote bool, err error)) error {
	for try := range maxTries {
		r, err := c.load(key)
		if err == nil {
			err = r.is(kind)
		}
		if err != nil {
			return err
		}
		made := r.kind == kindNone
		if made {
			if !create {
				_, err = f(0)
				return err
			}
			if r.id, err = c.establish(key, kind, &r); lost(err) {
				pause(try)
				continue
			} else if err != nil {
				return err
			}
		}
		wrote, err := f(r.id)
		c.partly = c.partly || wrote
		if made && (err != nil || !wrote) {
			_ = c.s.reap(c.s.ctx, AppendKey(nil, c.db, key), r.id) // the sweep will, if we cannot
		}
		if err != nil || !wrote {
			return err
		}
		ok, err := c.stands(key, r.id)
		if err != nil || ok {
			return err
		}
		// The key was removed meanwhile: what we wrote hangs on nothing.
		if err := c.s.drop(c.s.ctx, r.id); err != nil {
			return err
		}
		c.partly = false
		pause(try)
	}
	return errContended
}
