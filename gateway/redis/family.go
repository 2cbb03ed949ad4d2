package redis

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"

	"github.com/quarrystore/quarry/btree"
)

// dropBatch is how many entries are removed between two looks at the tree.
const dropBatch = 512

// The life of an id and of the fields that belong to it:
//
//  1. newID puts its owner, the record that names the key.
//  2. establish, or a copy, lets the key's record name the id; the record is newborn, and
//     readers treat the key as absent.
//  3. The maker writes fields, and confirm takes the flag away if the owner is not
//     condemned. Other writers decide on a newborn record before they go on.
//  4. The removal or replacement of the key's record ends the id; drop removes the owner and
//     then the fields.
//
// A sweep, or the removal of an empty hash, ends an id without a command that removes the
// key. It sets the condemned flag of the owner first. The maker of a newborn id that finds
// its owner condemned takes a new id. A confirmed id that its key names has the flag cleared
// by acquit, which first gives the key's record a new version: the conditional removal of
// the record then fails. So while an owner is not condemned no field of its id has been
// removed, and a removed owner is never put again.

// establish makes an empty hash or sorted set at a key whose record is r, and sets r to the
// new record. If another command changed the key first, lost(err) is true.
func (c *conn) establish(key []byte, kind byte, r *record) error {
	o := owner{kind: kind, made: c.now, db: byte(c.db), key: key}
	id, _, err := c.newID(&o)
	if err != nil {
		return err
	}
	next := record{newborn: kind, id: id}
	c.key = AppendKey(c.key[:0], c.db, key)
	c.enc = appendNewborn(c.enc[:0], kind, 0, id)
	if next.version, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond()); err != nil {
		if lost(err) {
			_ = c.s.tree.Delete(c.s.ctx, appendID(nil, ownerFamily, id))
		}
		return err
	}
	if r.id != 0 {
		c.s.later(r.id)
	}
	*r = next
	return nil
}

// idRow gives ids in rows that begin at random. So what a connection makes one after the other stands
// side by side in the tree, owners and fields alike, and new hashes share leaves and their splits.
// Rows meet less often than as many random ids would.
type idRow struct {
	next uint64 // id that the row gives next, while left is above 0
	left int    // of the row
}

// rowIDs is the length of a row.
const rowIDs = 256

// take returns an id that is not 0.
func (r *idRow) take(random func() uint64) (id uint64) {
	for id == 0 {
		if r.left == 0 {
			*r = idRow{next: random(), left: rowIDs}
		}
		id = r.next
		r.next++
		r.left--
	}
	return id
}

// newID puts the owner of an id that has no owner, and returns the id.
func (c *conn) newID(o *owner) (id, version uint64, err error) {
	for range maxTries {
		id = c.ids.take(c.s.random)
		version, err = c.s.tree.PutIf(c.s.ctx, appendID(nil, ownerFamily, id), o.append(nil), btree.IfAbsent())
		if !lost(err) {
			return id, version, err
		}
		c.ids.left = 0 // the row meets another one
	}
	return 0, 0, errContended
}

// owner reads the owner of an id; version 0 if there is none.
func (s *Server) owner(ctx context.Context, id uint64) (o owner, version uint64, err error) {
	raw, version, err := s.tree.GetVersion(ctx, appendID(nil, ownerFamily, id), nil)
	if errors.Is(err, btree.ErrNoKey) {
		return o, 0, nil
	} else if err != nil {
		return o, 0, err
	}
	o, err = decodeOwner(raw)
	return o, version, err
}

// confirm ends the birth of a hash or sorted set that this connection has made, with the
// record r. It says whether the key names the id. errCondemned: a sweep had condemned the
// owner, and confirm has removed the record before another gateway confirmed it.
func (c *conn) confirm(key []byte, r *record) (bool, error) {
	o, version, err := c.s.owner(c.s.ctx, r.id)
	if err != nil {
		return false, err
	}
	c.key = AppendKey(c.key[:0], c.db, key)
	if version == 0 || o.condemned {
		// A sweep has condemned the id as abandoned, or another gateway has confirmed the record
		// and removed it.
		if err := c.s.tree.DeleteIf(c.s.ctx, c.key, r.cond()); err != nil {
			return false, ignoreLost(err)
		}
		return false, errCondemned
	}
	c.enc = appendFamily(c.enc[:0], r.newborn, r.expiry, r.id)
	if _, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond()); lost(err) {
		return c.stands(key, r.id)
	}
	return err == nil, err
}

// decide confirms the newborn record r of another maker, at c.key, or removes it if its
// owner is gone or condemned. The caller loads the record again.
func (c *conn) decide(r *record) error {
	o, version, err := c.s.owner(c.s.ctx, r.id)
	if err != nil {
		return err
	}
	if version == 0 || o.condemned {
		return ignoreLost(c.s.tree.DeleteIf(c.s.ctx, c.key, r.cond()))
	}
	c.enc = appendFamily(c.enc[:0], r.newborn, r.expiry, r.id)
	_, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond())
	return ignoreLost(err)
}

// stands says whether a key still names an id. The read of the record clears its dying flag,
// so that a removal in progress fails. See invariant 3.
func (c *conn) stands(key []byte, id uint64) (bool, error) {
	for try := range maxTries {
		r, err := c.load(key)
		if err != nil || r.id != id || r.newborn == 0 {
			return err == nil && r.kind != kindNone && r.id == id, err
		}
		// This connection has made it, and its confirmation met another change.
		if err := c.decide(&r); err != nil {
			return false, err
		}
		pause(try)
	}
	return false, errContended
}

// alive says whether no field of an id has been removed with it: then what was written
// before counts. The id has another key by now, or it was written to before its key was
// removed.
func (s *Server) alive(ctx context.Context, id uint64) (bool, error) {
	at := appendID(nil, ownerFamily, id)
	for try := range maxTries {
		o, version, err := s.owner(ctx, id)
		if err != nil || version == 0 || !o.condemned {
			return version != 0, err
		}
		named, err := s.names(ctx, o, id)
		switch {
		case err != nil || named == namedNewborn:
			return false, err
		case named == namedConfirmed:
			err = s.acquit(ctx, o, id, version)
		default:
			err = s.tree.DeleteIf(ctx, at, btree.IfVersion(version))
		}
		if err != nil && !lost(err) {
			return false, err
		}
		pause(try)
	}
	return false, errContended
}

// naming says how the key of an owner names its id.
type naming uint8

const (
	namedNot naming = iota
	namedNewborn
	namedConfirmed
)

// names says whether the key of an owner names its id. A move of the key is carried on.
func (s *Server) names(ctx context.Context, o owner, id uint64) (naming, error) {
	key := o.treeKey()
	for try := range maxTries {
		r, _, err := s.peek(ctx, key)
		switch {
		case err != nil:
			return namedNot, err
		case r.mark == 0 && r.id != id:
			return namedNot, nil
		case r.mark == 0 && r.newborn != 0:
			return namedNewborn, nil
		case r.mark == 0:
			return namedConfirmed, nil
		}
		if err := s.settle(ctx, key, &r); err != nil {
			return namedNot, err
		}
		now, version, err := s.owner(ctx, id)
		if err != nil || version == 0 {
			return namedNot, err
		}
		if o = now; !bytes.Equal(o.treeKey(), key) {
			key = o.treeKey() // it has moved
		}
		pause(try)
	}
	return namedNot, errContended
}

// condemn sets the condemned flag of an owner that has the given version, and returns the
// owner's new version, or 0 if another gateway changed the owner first.
func (s *Server) condemn(ctx context.Context, o owner, id, version uint64) (uint64, error) {
	o.condemned = true
	version, err := s.tree.PutIf(ctx, appendID(nil, ownerFamily, id), o.append(nil), btree.IfVersion(version))
	if lost(err) {
		return 0, nil
	}
	return version, err
}

// acquit clears the condemned flag of an owner, if the key names the id and the id is
// confirmed. The key's record gets a new version first, so that the conditional removal of
// the record by the gateway that condemned the owner fails.
func (s *Server) acquit(ctx context.Context, o owner, id, version uint64) error {
	key := o.treeKey()
	for try := range maxTries {
		r, _, err := s.peek(ctx, key)
		if err != nil || r.id != id || r.newborn != 0 {
			return err
		}
		ok, err := s.touch(ctx, key, r.version)
		if err == nil && ok {
			o.condemned = false
			_, err = s.tree.PutIf(ctx, appendID(nil, ownerFamily, id), o.append(nil), btree.IfVersion(version))
			return ignoreLost(err)
		}
		if err != nil {
			return err
		}
		pause(try)
	}
	return errContended
}

// reapTries bounds the wait for another gateway that removes the same empty hash.
const reapTries = 32

// reap removes the record of a hash or sorted set without fields. key is the tree's.
func (s *Server) reap(ctx context.Context, key []byte, id uint64) error {
	for try := range maxTries {
		r, raw, err := s.peek(ctx, key)
		if err != nil || r.id != id {
			return err // also where a move is on its way
		}
		kind := max(r.kind, r.newborn)
		if empty, err := s.empty(ctx, id, kind); err != nil || !empty {
			return err
		}
		o, owned, err := s.owner(ctx, id)
		if err != nil {
			return err
		}
		if owned != 0 && o.condemned {
			if try == reapTries {
				return nil // the other gateway is suspended or dead: a sweep decides
			}
			pause(try)
			continue
		}
		// From here on every gateway that loads the record clears the dying flag.
		raw[0] |= flagDies
		version, err := s.tree.PutIf(ctx, key, raw, r.cond())
		if lost(err) {
			pause(try)
			continue
		} else if err != nil {
			return err
		}
		empty, err := s.empty(ctx, id, kind)
		if err != nil {
			return err
		}
		if !empty {
			raw[0] &^= flagDies
			_, err = s.tree.PutIf(ctx, key, raw, btree.IfVersion(version))
			return ignoreLost(err)
		}
		if removed, err := s.removeDying(ctx, key, btree.IfVersion(version), id, kind, o, owned); removed || err != nil {
			return err
		}
		pause(try)
	}
	return errContended
}

// removeDying removes the record of an empty hash or sorted set that has the dying flag, and its owner's
// record. false without an error: the record, or the owner's, has changed meanwhile.
func (s *Server) removeDying(ctx context.Context, key []byte, cond btree.Cond, id uint64, kind byte, o owner, owned uint64) (removed bool, err error) {
	// A writer that has added a field and finds no record must learn that the field is gone.
	if owned != 0 {
		if owned, err = s.condemn(ctx, o, id, owned); owned == 0 || err != nil {
			return false, err
		}
	}
	if err = s.tree.DeleteIf(ctx, key, cond); err == nil {
		return true, s.disown(ctx, id, kind == kindZset)
	} else if !lost(err) || owned == 0 {
		return false, ignoreLost(err)
	}
	return false, s.acquit(ctx, o, id, owned)
}

// empty says whether an id has no fields; false beside an error. It removes claims of
// members: the ZADD that has put a claim finds it gone and starts again.
func (s *Server) empty(ctx context.Context, id uint64, kind byte) (bool, error) {
	const some = 16
	r := within(appendID(nil, fieldFamily, id))
	r.Limit = 1
	for {
		var claims arena
		var versions []uint64
		empty := true
		err := s.tree.Scan(ctx, r, func(key, value []byte, version uint64) bool {
			if kind != kindZset || len(value) == scoreBytes {
				empty = false
				return false
			}
			claims.b = append(claims.b, key...)
			claims.end()
			versions = append(versions, version)
			return true
		})
		if err != nil {
			return false, err
		}
		if !empty || len(versions) == 0 {
			return empty, nil
		}
		for i, key := range claims.all() {
			if err := ignoreLost(s.tree.DeleteIf(ctx, key, btree.IfVersion(versions[i]))); err != nil {
				return false, err
			}
		}
		r.Limit = some
	}
}

// drop removes the owner, places and fields of an id. The caller has removed or replaced the
// key's record. The owner is removed first: while it exists no field has been removed.
func (s *Server) drop(ctx context.Context, id uint64) error {
	if err := s.disown(ctx, id, true); err != nil {
		return err
	}
	return s.clear(ctx, appendID(nil, fieldFamily, id))
}

// disown removes the owner of an id, and places if there may be any. A field that is put
// behind it is left: its writer looks whether it is still there; see counted.
func (s *Server) disown(ctx context.Context, id uint64, places bool) error {
	err := ignoreLost(s.tree.Delete(ctx, appendID(nil, ownerFamily, id)))
	if err == nil && places {
		err = s.clear(ctx, appendID(nil, orderFamily, id))
	}
	return err
}

// clear removes all keys with a prefix, each once and in their order: a field that a writer
// puts behind its removal is left to that writer; see counted.
func (s *Server) clear(ctx context.Context, prefix []byte) error {
	r := within(prefix)
	for {
		keys, err := s.some(ctx, r, dropBatch)
		if err != nil || len(keys) == 0 {
			return err
		}
		for _, k := range keys {
			if err := s.tree.Delete(ctx, k); err != nil && !errors.Is(err, btree.ErrNoKey) {
				return err
			}
		}
		if len(keys) < dropBatch {
			return nil
		}
		r.From = append(keys[len(keys)-1], 0)
	}
}

// some are the first keys of a range.
func (s *Server) some(ctx context.Context, r btree.Range, limit int) ([][]byte, error) {
	var a arena
	r.Limit = limit
	err := s.tree.Scan(ctx, r, func(key, _ []byte, _ uint64) bool {
		a.b = append(a.b, key...)
		a.end()
		return true
	})
	return a.all(), err
}

// idOf is the id in a key of a family.
func idOf(key []byte) uint64 {
	if len(key) < 1+idBytes {
		return 0
	}
	return binary.BigEndian.Uint64(key[1:])
}
