package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// checkFields refuses fields that the tree cannot hold, before anything is written.
func (c *conn) checkFields(a [][]byte, step int) error {
	for i := 0; i < len(a); i += step {
		if len(a[i]) > c.s.maxFieldBytes() {
			return fmt.Errorf("field of %d bytes: %w", len(a[i]), btree.ErrBadKey)
		}
	}
	return nil
}

// field reads a field; version 0 if it is not there.
func (c *conn) field(id uint64, field []byte) (value []byte, version uint64, err error) {
	c.key2 = appendField(c.key2[:0], id, field)
	value, version, err = c.s.tree.GetVersion(c.s.ctx, c.key2, c.raw[:0])
	if errors.Is(err, btree.ErrNoKey) {
		return nil, 0, nil
	}
	if err == nil {
		c.raw = value
	}
	return value, version, err
}

// fieldCond is the condition that a field still has the version that was read; 0: that it is absent.
func fieldCond(version uint64) btree.Cond {
	if version == 0 {
		return btree.IfAbsent()
	}
	return btree.IfVersion(version)
}

// editField changes a field atomically: f appends its next value to b, or says
// errLeave. version is 0 where there is none. bytes is about what f makes.
func (c *conn) editField(id uint64, field []byte, bytes int, f func(value []byte, version uint64, b []byte) ([]byte, error)) (wrote bool, err error) {
	if bytes <= shortBytes {
		var base uint64
		c.key2 = appendField(c.key2[:0], id, field)
		version, err := c.s.tree.EditVersion(c.s.ctx, c.key2, func(old []byte, version uint64) ([]byte, bool, error) {
			base = version
			b, err := f(old, version, c.enc[:0])
			if err == nil {
				c.enc = b
			}
			return b, false, err
		})
		if err == errLeave {
			return false, nil
		} else if !errors.Is(err, kv.ErrNoEdit) {
			c.written = append(c.written, written{field, version, base})
			return err == nil, err
		}
	}
	return c.rewriteField(id, field, f)
}

// rewriteField is editField for a value that cannot be edited in its leaf.
func (c *conn) rewriteField(id uint64, field []byte, f func(value []byte, version uint64, b []byte) ([]byte, error)) (wrote bool, err error) {
	for try := range maxTries {
		value, base, err := c.field(id, field)
		if err != nil {
			return false, err
		}
		b, err := f(value, base, c.enc[:0])
		if err == errLeave {
			return false, nil
		} else if err != nil {
			return false, err
		}
		c.enc = b
		if version, err := c.s.tree.PutIf(c.s.ctx, c.key2, b, fieldCond(base)); !lost(err) {
			c.written = append(c.written, written{field, version, base})
			return err == nil, err
		}
		pause(try)
	}
	return false, errContended
}

// setFields sets pairs of fields and values, in order, and counts the new ones.
func (c *conn) setFields(key []byte, pairs [][]byte) (added int, err error) {
	if err := c.checkFields(pairs, 2); err != nil {
		return 0, err
	}
	err = c.within(key, kindHash, true, func(id uint64) (effect, error) {
		added = 0
		for from := 0; from < len(pairs); from += 2 * btree.MaxGroup {
			n, err := c.putFields(id, pairs[from:min(len(pairs), from+2*btree.MaxGroup)])
			if added += n; err != nil {
				return wroteIf(len(c.written) > 0), err
			}
		}
		return effectWrote, nil
	})
	return added, err
}

// putFields sets at most btree.MaxGroup fields.
func (c *conn) putFields(id uint64, pairs [][]byte) (added int, err error) {
	c.keys.reset()
	for i := 0; i < len(pairs); i += 2 {
		c.keys.b = appendField(c.keys.b, id, pairs[i])
		c.keys.end()
	}
	c.writes = c.writes[:0]
	for i, key := range c.keys.all() {
		c.writes = append(c.writes, btree.Write{Key: key, Value: pairs[2*i+1]})
	}
	_, err = c.runs(func(i int, w *btree.Write) error {
		if w.Err != nil {
			return w.Err
		}
		c.written = append(c.written, written{pairs[2*i], w.Version, w.Base})
		if w.Base == 0 {
			added++
		}
		return nil
	})
	return added, err
}

// hset answers the number of fields that were not there before.
func hset(c *conn, a [][]byte) error {
	if len(a)%2 != 0 {
		return wrongArity("hset")
	}
	n, err := c.setFields(a[1], a[2:])
	if err == nil {
		c.integer(int64(n))
	}
	return err
}

// hmset is HSET with OK as its answer, for old clients.
func hmset(c *conn, a [][]byte) error {
	if len(a)%2 != 0 {
		return wrongArity("hmset")
	}
	_, err := c.setFields(a[1], a[2:])
	if err == nil {
		c.ok()
	}
	return err
}

// hsetnx sets a field that is absent.
func hsetnx(c *conn, a [][]byte) error {
	if err := c.checkFields(a[2:3], 1); err != nil {
		return err
	}
	done := false
	err := c.within(a[1], kindHash, true, func(id uint64) (effect, error) {
		wrote, err := c.editField(id, a[2], len(a[3]), func(_ []byte, version uint64, b []byte) ([]byte, error) {
			if done = version == 0; !done {
				return nil, errLeave
			}
			return append(b, a[3]...), nil
		})
		return wroteIf(wrote), err
	})
	if err == nil {
		c.flag(done)
	}
	return err
}

// hincrby adds to a field.
func hincrby(c *conn, a [][]byte) error {
	by, ok := parseInt(a[3])
	if !ok {
		return errNotInteger
	}
	if err := c.checkFields(a[2:3], 1); err != nil {
		return err
	}
	var sum int64
	err := c.within(a[1], kindHash, true, func(id uint64) (effect, error) {
		wrote, err := c.editField(id, a[2], 0, addToField(by, &sum))
		return wroteIf(wrote), err
	})
	if err == nil {
		c.integer(sum)
	}
	return err
}

// addToField makes the next value of a field, and sets sum to it. It is called again with the field's new
// value when another writer was faster, so the sum starts anew in each call.
func addToField(by int64, sum *int64) func(value []byte, version uint64, b []byte) ([]byte, error) {
	return func(value []byte, version uint64, b []byte) (_ []byte, err error) {
		old := int64(0)
		if version != 0 {
			var ok bool
			if old, ok = parseInt(value); !ok {
				return nil, fault("ERR hash value is not an integer")
			}
		}
		if *sum, err = plus(old, by); err != nil {
			return nil, err
		}
		return strconv.AppendInt(b, *sum, 10), nil
	}
}

func hget(c *conn, a [][]byte) error {
	return c.read(a[1], kindHash, func(id uint64) (missed bool, err error) { return c.fieldValue(id, a[2]) })
}

// fieldValue answers with a field, or null if it is missed.
func (c *conn) fieldValue(id uint64, field []byte) (missed bool, err error) {
	if id == 0 || len(field) > c.s.maxFieldBytes() {
		c.null()
		return false, nil
	}
	value, version, err := c.field(id, field)
	switch {
	case err != nil:
		return false, err
	case version == 0:
		c.null()
		return true, nil
	}
	c.bulk(value)
	return false, nil
}

// hmget reads the fields one after the other; they are not read at one instant.
func hmget(c *conn, a [][]byte) error {
	return c.read(a[1], kindHash, func(id uint64) (missed bool, err error) {
		mark := len(c.out)
		c.array(len(a) - 2)
		for _, field := range a[2:] {
			miss, err := c.fieldValue(id, field)
			if err != nil {
				return false, err
			}
			if missed = missed || miss; c.tooMuch(mark) {
				return false, errReply
			}
		}
		return missed, nil
	})
}

func hexists(c *conn, a [][]byte) error {
	return c.read(a[1], kindHash, func(id uint64) (missed bool, err error) {
		var version uint64
		if id != 0 && len(a[2]) <= c.s.maxFieldBytes() {
			_, version, err = c.field(id, a[2])
		}
		if err == nil {
			c.flag(version != 0)
		}
		return version == 0, err
	})
}

func hdel(c *conn, a [][]byte) error {
	return c.removeAll(a, kindHash, func(id uint64, field []byte) (bool, error) {
		c.key2 = appendField(c.key2[:0], id, field)
		err := c.s.tree.Delete(c.s.ctx, c.key2)
		if errors.Is(err, btree.ErrNoKey) {
			return false, nil
		}
		return err == nil, err
	})
}

// removeAll removes the fields or members that a command names, and the key with the
// last of them. one says whether there was such a field. Fields that were missed because
// their id has ended are looked for again under the id that the key names by now.
func (c *conn) removeAll(a [][]byte, kind byte, one func(id uint64, field []byte) (bool, error)) error {
	n, fields := 0, a[2:]
	for try := range maxTries {
		id, err := c.family(a[1], kind)
		if err != nil {
			return err
		}
		removed := false
		var missed [][]byte
		for _, field := range fields {
			if id == 0 || len(field) > c.s.maxFieldBytes() {
				continue
			}
			ok, err := one(id, field)
			switch {
			case err != nil:
				return err
			case !ok:
				missed = append(missed, field)
			default:
				n++
				removed, c.did.part = true, true
			}
		}
		intact := true
		if len(missed) > 0 {
			if intact, err = c.s.alive(c.s.ctx, id); err != nil {
				return err
			}
		}
		if intact && removed {
			c.s.leave(c.s.reap(c.s.ctx, AppendKey(nil, c.db, a[1]), id))
		}
		if intact {
			c.integer(int64(n))
			return nil
		}
		fields = missed
		c.hits--
		pause(try)
	}
	return errContended
}

func hlen(c *conn, a [][]byte) error  { return c.card(a[1], kindHash) }
func zcard(c *conn, a [][]byte) error { return c.card(a[1], kindZset) }

// card counts the fields.
func (c *conn) card(key []byte, kind byte) error {
	return c.read(key, kind, func(id uint64) (missed bool, err error) {
		n := 0
		if id != 0 {
			n, err = c.s.count(c.s.ctx, id, kind)
		}
		if err == nil {
			c.integer(int64(n))
		}
		return true, err
	})
}

// count counts the fields or members of an id.
func (s *Server) count(ctx context.Context, id uint64, kind byte) (n int, err error) {
	r := within(appendID(nil, fieldFamily, id))
	if kind != kindZset {
		return s.tree.Count(ctx, r)
	}
	err = s.tree.Scan(ctx, r, func(_, value []byte, _ uint64) bool {
		if len(value) == scoreBytes { // no claim
			n++
		}
		return true
	})
	return n, err
}

func hgetall(c *conn, a [][]byte) error {
	return c.fields(a[1], c.mapping, func(field, value []byte) { c.bulk(field); c.bulk(value) })
}

func hkeys(c *conn, a [][]byte) error {
	return c.fields(a[1], c.array, func(field, _ []byte) { c.bulk(field) })
}

func hvals(c *conn, a [][]byte) error {
	return c.fields(a[1], c.array, func(_, value []byte) { c.bulk(value) })
}

// fields answers with all fields of a hash, in order.
func (c *conn) fields(key []byte, announce func(int), each func(field, value []byte)) error {
	return c.read(key, kindHash, func(id uint64) (missed bool, err error) {
		mark, n := len(c.out), 0
		if id != 0 {
			err = c.s.tree.Scan(c.s.ctx, within(appendID(nil, fieldFamily, id)), func(key, value []byte, _ uint64) bool {
				n++
				each(key[1+idBytes:], value)
				return !c.tooMuch(mark)
			})
		}
		if err == nil && c.tooMuch(mark) {
			err = errReply
		}
		if err == nil {
			c.precede(mark, announce, n)
		}
		return true, err
	})
}
