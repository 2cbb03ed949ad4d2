package resp

import (
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
		c.key2 = appendField(c.key2[:0], id, field)
		err := c.s.tree.Edit(c.s.ctx, c.key2, func(old []byte, version uint64) ([]byte, bool, error) {
			b, err := f(old, version, c.enc[:0])
			if err == nil {
				c.enc = b
			}
			return b, false, err
		})
		if err == errLeave {
			return false, nil
		} else if !errors.Is(err, kv.ErrNoEdit) {
			return err == nil, err
		}
	}
	for try := range maxTries {
		value, version, err := c.field(id, field)
		if err != nil {
			return false, err
		}
		b, err := f(value, version, c.enc[:0])
		if err == errLeave {
			return false, nil
		} else if err != nil {
			return false, err
		}
		c.enc = b
		if _, err = c.s.tree.PutIf(c.s.ctx, c.key2, b, fieldCond(version)); !lost(err) {
			return err == nil, err
		}
		pause(try)
	}
	return false, errContended
}

// setFields sets pairs of fields and values, and counts the new ones.
func (c *conn) setFields(key []byte, pairs [][]byte) (added int, err error) {
	if err := c.checkFields(pairs, 2); err != nil {
		return 0, err
	}
	err = c.within(key, kindHash, true, func(id uint64) (bool, error) {
		added = 0
		any := false
		for i := 0; i < len(pairs); i += 2 {
			fresh := false
			_, err := c.editField(id, pairs[i], len(pairs[i+1]), func(_ []byte, version uint64, b []byte) ([]byte, error) {
				fresh = version == 0
				return append(b, pairs[i+1]...), nil
			})
			if err != nil {
				c.partly = c.partly || any
				return any, err
			}
			any = true
			if fresh {
				added++
			}
		}
		return any, nil
	})
	return added, err
}

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

func hsetnx(c *conn, a [][]byte) error {
	if err := c.checkFields(a[2:3], 1); err != nil {
		return err
	}
	done := false
	err := c.within(a[1], kindHash, true, func(id uint64) (bool, error) {
		return c.editField(id, a[2], len(a[3]), func(_ []byte, version uint64, b []byte) ([]byte, error) {
			if done = version == 0; !done {
				return nil, errLeave
			}
			return append(b, a[3]...), nil
		})
	})
	if err == nil {
		c.flag(done)
	}
	return err
}

func hincrby(c *conn, a [][]byte) error {
	by, ok := parseInt(a[3])
	if !ok {
		return errNotInteger
	}
	if err := c.checkFields(a[2:3], 1); err != nil {
		return err
	}
	var sum int64
	err := c.within(a[1], kindHash, true, func(id uint64) (bool, error) {
		return c.editField(id, a[2], 0, func(value []byte, version uint64, b []byte) (_ []byte, err error) {
			sum = 0
			if version != 0 {
				if sum, ok = parseInt(value); !ok {
					return nil, fault("ERR hash value is not an integer")
				}
			}
			if sum, err = plus(sum, by); err != nil {
				return nil, err
			}
			return strconv.AppendInt(b, sum, 10), nil
		})
	})
	if err == nil {
		c.integer(sum)
	}
	return err
}

func hget(c *conn, a [][]byte) error {
	id, err := c.family(a[1], kindHash)
	if err != nil {
		return err
	}
	return c.fieldValue(id, a[2])
}

// fieldValue answers with a field.
func (c *conn) fieldValue(id uint64, field []byte) error {
	if id == 0 || len(field) > c.s.maxFieldBytes() {
		c.null()
		return nil
	}
	value, version, err := c.field(id, field)
	switch {
	case err != nil:
		return err
	case version == 0:
		c.null()
	default:
		c.bulk(value)
	}
	return nil
}

func hmget(c *conn, a [][]byte) error {
	id, err := c.family(a[1], kindHash)
	if err != nil {
		return err
	}
	mark := len(c.out)
	c.array(len(a) - 2)
	for _, field := range a[2:] {
		if err := c.fieldValue(id, field); err != nil {
			return err
		}
		if c.tooMuch(mark) {
			return errReply
		}
	}
	return nil
}

func hexists(c *conn, a [][]byte) error {
	id, err := c.family(a[1], kindHash)
	if err != nil {
		return err
	}
	var version uint64
	if id != 0 && len(a[2]) <= c.s.maxFieldBytes() {
		_, version, err = c.field(id, a[2])
	}
	if err == nil {
		c.flag(version != 0)
	}
	return err
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
// last of them. one says whether there was such a field.
func (c *conn) removeAll(a [][]byte, kind byte, one func(id uint64, field []byte) (bool, error)) error {
	id, err := c.family(a[1], kind)
	if err != nil {
		return err
	}
	n := 0
	for _, field := range a[2:] {
		if id == 0 || len(field) > c.s.maxFieldBytes() {
			continue
		}
		ok, err := one(id, field)
		if err != nil {
			return err
		}
		if ok {
			n++
			c.partly = true
		}
	}
	if n > 0 {
		if err := c.s.reap(c.s.ctx, AppendKey(nil, c.db, a[1]), id); err != nil {
			return err
		}
	}
	c.integer(int64(n))
	return nil
}

func hlen(c *conn, a [][]byte) error  { return c.card(a[1], kindHash) }
func zcard(c *conn, a [][]byte) error { return c.card(a[1], kindZset) }

// card counts the fields.
func (c *conn) card(key []byte, kind byte) error {
	id, err := c.family(key, kind)
	n := 0
	if err == nil && id != 0 {
		n, err = c.s.tree.Count(c.s.ctx, within(appendID(nil, fieldFamily, id)))
	}
	if err == nil {
		c.integer(int64(n))
	}
	return err
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
	id, err := c.family(key, kindHash)
	if err != nil {
		return err
	}
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
	return err
}
