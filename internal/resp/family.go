package resp

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"

	"github.com/quarrystore/quarry/btree"
)

// dropBatch is how many entries are removed between two looks at the tree.
const dropBatch = 512

// establish makes an empty hash or sorted set at a key whose record is r; an error
// that is lost if others were faster. The owner's record comes first: fields
// without one are remains.
func (c *conn) establish(key []byte, kind byte, r *record) (uint64, error) {
	id, err := c.newID(kind, key)
	if err != nil {
		return 0, err
	}
	if err := c.establishAs(key, kind, 0, id, r); err != nil {
		if lost(err) {
			_ = c.s.tree.Delete(c.s.ctx, appendID(nil, ownerFamily, id))
		}
		return 0, err
	}
	return id, nil
}

// newID takes an id that nobody has had.
func (c *conn) newID(kind byte, key []byte) (uint64, error) {
	for range maxTries {
		id := rand.Uint64()
		o := owner{kind: kind, made: c.now, db: byte(c.db), key: key}
		_, err := c.s.tree.PutIf(c.s.ctx, appendID(nil, ownerFamily, id), o.append(nil), btree.IfAbsent())
		if !lost(err) {
			return id, err
		}
	}
	return 0, errContended
}

// establishAs aims a key at an id.
func (c *conn) establishAs(key []byte, kind byte, expiry int64, id uint64, r *record) error {
	c.key = AppendKey(c.key[:0], c.db, key)
	c.enc = appendFamily(c.enc[:0], kind, expiry, id)
	if _, err := c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond()); err != nil {
		return err
	}
	if r.id != 0 {
		c.s.later(r.id)
	}
	// Had we slept for very long, a sweep would have taken the owner for forgotten.
	at := appendID(nil, ownerFamily, id)
	version, err := c.s.versionOf(at)
	if err == nil && version == 0 {
		o := owner{kind: kind, made: c.now, db: byte(c.db), key: key}
		if _, err = c.s.tree.PutIf(c.s.ctx, at, o.append(nil), btree.IfAbsent()); lost(err) {
			err = nil
		}
	}
	return err
}

// stands says whether a key still names an id, and calls off its removal if
// somebody has begun one. See invariant 3.
func (c *conn) stands(key []byte, id uint64) (bool, error) {
	for try := range maxTries {
		r, err := c.load(key)
		if err != nil || r.kind == kindNone || r.id != id {
			return false, err
		}
		if !r.dying {
			return true, nil
		}
		c.enc = appendFamily(c.enc[:0], r.kind, r.expiry, id)
		_, err = c.s.tree.PutIf(c.s.ctx, c.key, c.enc, r.cond())
		if !lost(err) {
			return err == nil, err
		}
		pause(try)
	}
	return false, errContended
}

// reap removes the record of a hash or sorted set without fields. key is the tree's.
func (s *Server) reap(ctx context.Context, key []byte, id uint64) error {
	for try := range maxTries {
		if empty, err := s.empty(ctx, id); err != nil || !empty {
			return err
		}
		raw, version, err := s.tree.GetVersion(ctx, key, nil)
		if errors.Is(err, btree.ErrNoKey) {
			return nil
		} else if err != nil {
			return err
		}
		r, err := decode(raw, version, 0)
		if err != nil || r.id != id {
			return err
		}
		// From here on whoever adds a field finds that we are at it.
		raw[0] |= flagDies
		version, err = s.tree.PutIf(ctx, key, raw, r.cond())
		if lost(err) {
			pause(try)
			continue
		} else if err != nil {
			return err
		}
		empty, err := s.empty(ctx, id)
		if err != nil {
			return err
		}
		if !empty {
			raw[0] &^= flagDies
			_, err = s.tree.PutIf(ctx, key, raw, btree.IfVersion(version))
			if lost(err) {
				err = nil
			}
			return err
		}
		if err = s.tree.DeleteIf(ctx, key, btree.IfVersion(version)); !lost(err) {
			if err == nil {
				err = s.drop(ctx, id)
			}
			return err
		}
		pause(try)
	}
	return errContended
}

// empty says whether an id has no fields.
func (s *Server) empty(ctx context.Context, id uint64) (bool, error) {
	r := within(appendID(nil, fieldFamily, id))
	r.Limit = 1
	empty := true
	err := s.tree.Scan(ctx, r, func(_, _ []byte, _ uint64) bool { empty = false; return false })
	return empty, err
}

// drop removes all that hangs on an id to which no key leads any more.
func (s *Server) drop(ctx context.Context, id uint64) error {
	for _, family := range []byte{fieldFamily, orderFamily} {
		if err := s.clear(ctx, appendID(nil, family, id)); err != nil {
			return err
		}
	}
	err := s.tree.Delete(ctx, appendID(nil, ownerFamily, id))
	if errors.Is(err, btree.ErrNoKey) {
		return nil
	}
	return err
}

// clear removes all keys with a prefix.
func (s *Server) clear(ctx context.Context, prefix []byte) error {
	for {
		keys, err := s.some(ctx, within(prefix), dropBatch)
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
