package redis

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// errSourceGone: the source has no fields, or they were being removed while they were copied.
var errSourceGone = errors.New("the source was emptied or replaced while it was copied")

// errCondemned: a sweep has taken the id that is being built for abandoned.
var errCondemned = errors.New("condemned while it was built")

// duplicate writes what r holds under another key; false if the key is there and replace is
// not set. errSourceGone if r has no fields, or its id ended before all were copied.
//
// Linearizes at: the write of the key's record. Its value is what the source had at the
// load of r; fields and members are what they were when they were read.
func (c *conn) duplicate(r record, db int, to []byte, replace bool) (bool, error) {
	value := bytes.Clone(r.value)
	was := c.db
	c.db = db
	defer func() { c.db = was }()
	for try := range maxTries {
		old, err := c.load(to)
		if err != nil || !replace && old.kind != kindNone {
			return false, err
		}
		if !replace && old.newborn != 0 {
			if err := c.decide(&old); err != nil {
				return false, err
			}
			continue
		}
		if r.kind != kindString {
			ok, err := c.build(&r, to, &old, replace)
			if err != errCondemned {
				return ok, err
			}
		} else {
			c.enc = append(appendHead(c.enc[:0], kindString, r.expiry), value...)
			if _, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, old.cond()); err == nil {
				c.s.noteTime(c.enc)
				if old.id != 0 {
					c.s.later(old.id)
				}
			}
			if !lost(err) {
				return err == nil, err
			}
		}
		pause(try)
	}
	return false, errContended
}

// build copies a hash or sorted set to a new id, and makes the key name that id. old is the
// key's record. False if the key is there and replace is not set.
//
// Invariant: the key names the copy only while no field of the copy has been removed. The
// owner of the copy says which version of the key's record the copy will replace. A sweep
// that takes the copy for abandoned gives that record another version, and only then
// condemns the owner; so a write that replaces that version precedes the sweep. Where the
// key has no record there is no version to change: the copy is put as newborn, which counts
// as absent, and confirmed when its owner has been found uncondemned. A newborn record must
// not replace a record: the key would be absent for a moment.
func (c *conn) build(from *record, to []byte, old *record, replace bool) (bool, error) {
	o := owner{kind: from.kind, building: true, made: c.now, replaces: old.version, db: byte(c.db), key: to}
	id, version, err := c.newID(&o)
	if err != nil {
		return false, err
	}
	n, err := c.copyFields(from, id)
	whole := n > 0
	if err == nil && whole {
		// The owner of the source is removed before its fields are: if it is there, all fields
		// have been copied.
		whole, err = c.s.alive(c.s.ctx, from.id)
	}
	if err != nil {
		return false, err // a sweep removes the copy
	}
	named := false
	if err = errSourceGone; whole {
		named, err = c.nameCopy(from, to, replace, id, version, &o)
	}
	if !named && !c.did.unsettled && !errors.Is(err, client.ErrUnknown) {
		c.s.leave(c.s.drop(c.s.ctx, id))
	}
	return named, err
}

// nameCopy makes the key name the copy id of from, whose owner is o at version. False
// without an error if the key is there and replace is not set; errCondemned if a sweep has
// condemned the owner.
//
// Linearizes at: the PutIf of the key's record, or its confirmation if it was newborn.
func (c *conn) nameCopy(from *record, to []byte, replace bool, id, version uint64, o *owner) (bool, error) {
	for try := range maxTries {
		now, err := c.load(to)
		if err != nil || !replace && now.kind != kindNone {
			return false, err
		}
		if !replace && now.newborn != 0 {
			if err := c.decide(&now); err != nil {
				return false, err
			}
			continue
		}
		if version, err = c.noteReplaced(o, id, version, now.version); err != nil {
			return false, err
		}
		copied := record{kind: from.kind, id: id, expiry: from.expiry}
		c.key = AppendKey(c.key[:0], c.db, to)
		if c.enc = appendFamily(c.enc[:0], from.kind, from.expiry, id); now.version == 0 {
			copied.kind, copied.newborn = kindNone, from.kind
			c.enc[0] |= flagNew
		}
		if copied.version, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, now.cond()); lost(err) {
			pause(try)
			continue
		} else if err != nil {
			return false, err
		}
		c.s.noteTime(c.enc)
		if now.id != 0 {
			c.s.later(now.id)
		}
		if copied.newborn == 0 {
			return true, nil
		}
		c.did.unsettled = true // others may confirm it
		ok, err := c.confirmCopy(to, &copied)
		if err != nil && err != errCondemned && !errors.Is(err, client.ErrUnknown) {
			// While the record has its version, no gateway has confirmed it or seen its fields.
			c.did.unsettled = c.s.tree.DeleteIf(c.s.ctx, AppendKey(c.key[:0], c.db, to), copied.cond()) != nil
		}
		if ok || err == errCondemned {
			c.did.unsettled = false
		}
		return ok, err
	}
	return false, errContended
}

// noteReplaced records in the owner o of the copy id which version of the key's record the copy replaces, and returns
// the owner's new version. errCondemned if a sweep has condemned the owner.
func (c *conn) noteReplaced(o *owner, id, version, replaced uint64) (uint64, error) {
	if o.replaces == replaced {
		return version, nil
	}
	o.replaces = replaced
	version, err := c.s.tree.PutIf(c.s.ctx, appendID(nil, ownerFamily, id), o.append(nil), btree.IfVersion(version))
	if lost(err) {
		err = errCondemned
	}
	return version, err
}

// confirmCopy confirms the newborn record of a copy. errCondemned if a sweep has condemned
// its owner first, and the record has been taken back.
func (c *conn) confirmCopy(to []byte, copied *record) (bool, error) {
	ok, err := c.confirm(to, copied)
	if err == nil && !ok {
		ok, err = c.s.alive(c.s.ctx, copied.id)
	}
	if err == nil && !ok {
		// Others have removed the record. A command that did so after it was confirmed removes
		// the fields too. A sweep that condemned the copy leaves them until they are as old as
		// the orphan age. So fields that are there do not tell: they may be about to go.
		if ok, err = c.s.empty(c.s.ctx, copied.id, copied.newborn); err == nil && (!ok || c.late()) {
			ok, err = false, client.ErrUnknown
		}
	}
	return ok, err
}

// copyBatch is how many fields are copied at once.
const copyBatch = 256

// copyFields copies the fields or members of from to an id, and counts them. The places of
// members are made of the scores that are copied, so that both agree.
func (c *conn) copyFields(from *record, to uint64) (n int, err error) {
	r := within(appendID(nil, fieldFamily, from.id))
	r.Limit = copyBatch
	for more := true; more; {
		var places, none arena
		c.keys.reset()
		c.vals.reset()
		seen := 0
		var last []byte
		err := c.s.tree.Scan(c.s.ctx, r, func(key, value []byte, _ uint64) bool {
			seen++
			last = append(last[:0], key...)
			if from.kind == kindZset {
				if len(value) != scoreBytes {
					return true // a claim
				}
				places.b = appendPlace(places.b, to, math.Float64frombits(binary.BigEndian.Uint64(value)), key[1+idBytes:])
				places.end()
				none.end()
			}
			c.keys.b = appendField(c.keys.b, to, key[1+idBytes:])
			c.keys.end()
			c.vals.b = append(c.vals.b, value...)
			c.vals.end()
			n++
			return len(c.vals.b) < maxTogetherBytes
		})
		if err != nil {
			return n, err
		}
		if err := c.putAll(c.s.ctx, places.all(), none.all()); err != nil {
			return n, err
		}
		if err := c.putAll(c.s.ctx, c.keys.all(), c.vals.all()); err != nil {
			return n, err
		}
		more = seen > 0
		r.From = append(last, 0)
	}
	return n, nil
}

// putAll puts keys that no other gateway writes.
func (c *conn) putAll(ctx context.Context, keys, values [][]byte) error {
	if len(keys) == 0 {
		return nil
	}
	for _, err := range c.s.tree.PutManyIf(ctx, keys, values, btree.Cond{}) {
		if err != nil {
			return err
		}
	}
	return nil
}
