package redis

import (
	"bytes"
	"math"
	"slices"
	"strconv"

	"github.com/quarrystore/quarry/btree"
)

// join says which commands of a pipeline are executed together when they follow each other.
// Their order stays that of the pipeline for each key, and for each field of a hash.
type join uint8

const (
	joinNone join = iota
	joinGets
	joinSets
	joinAdds   // INCR, DECR, INCRBY, DECRBY: those of one leaf are one write of it
	joinFields // HSET, HMSET, HINCRBY: one load and one check of each hash
	joinZadds  // ZADD without options: likewise
)

// maxRun bounds the commands on numbers and fields that are executed together, and the fields.
const maxRun = btree.MaxGroup

// together executes request i and those behind it that join it, and returns their
// number; 0 if request i is to be executed by itself. GETs
// together cost fewer rounds and more processor time, which pays only where a round takes a
// round trip (Server.far).
func (c *conn) together(i int) int {
	cmd := c.batch[i].cmd
	if cmd == nil || cmd.joins == joinNone || cmd.joins == joinGets && !c.s.far.Load() ||
		!c.authenticated || !c.user.rights.Load().full || c.bounded() || c.silence != 0 || c.refusing {
		return 0
	}
	n := c.alike(i)
	if n < 2 {
		return 0
	}
	switch batch := c.batch[i : i+n]; cmd.joins {
	case joinGets:
		c.gets(batch)
	case joinSets:
		c.sets(batch)
	case joinAdds:
		c.adds(i, n)
	case joinFields:
		return c.setTogether(i, n)
	case joinZadds:
		return c.placeTogether(i, n)
	}
	return n
}

// alike is how many requests from i on are executed together.
func (c *conn) alike(i int) (n int) {
	fields, size := 0, 0
	for _, r := range c.batch[i:] {
		if r.cmd == nil || r.cmd.joins != c.batch[i].cmd.joins {
			return n
		}
		a := c.p.words[r.from:r.to]
		switch r.cmd.joins {
		case joinGets:
			if len(a) != 2 {
				return n
			}
		case joinSets: // plain ones; they copy their values before they write them
			if size += len(a[len(a)-1]); len(a) != 3 || size > maxTogetherBytes {
				return n
			}
		case joinAdds:
			if _, ok := addend(r.cmd, a); !ok || n == maxRun {
				return n
			}
		case joinFields:
			if fields += len(a)/2 - 1; !c.isPlain(r.cmd, a) || fields > maxRun {
				return n
			}
		case joinZadds:
			if fields += len(a)/2 - 1; fields > maxRun || !c.isPlainZadd(a) {
				return n
			}
		}
		n++
	}
	return n
}

// addend is what INCR and its like add; false for a command that they refuse.
func addend(cmd *command, a [][]byte) (by int64, ok bool) {
	if len(a) != cmd.arity {
		return 0, false
	}
	if by, ok = 1, true; len(a) == 3 {
		by, ok = parseInt(a[2])
	}
	if cmd.name[0] == 'd' {
		return -by, ok && by != math.MinInt64
	}
	return by, ok
}

// adding is a command that adds to a string.
type adding struct {
	by, sum int64
	amendment
	err error
}

// adding is the kth of the commands that are executed together.
func (c *conn) adding(k int, by int64) *adding {
	if k == len(c.addings) {
		m := &adding{}
		m.init(m.add)
		c.addings = append(c.addings, m)
	}
	m := c.addings[k]
	m.by, m.now = by, c.now
	return m
}

// adds executes INCR and its like; those of one leaf by one write of it, and many leaves together.
//
// Linearizes like one after the other, those of one key in their order.
func (c *conn) adds(i, n int) {
	c.keys.reset()
	var order [maxRun]uint8
	for k, r := range c.batch[i : i+n] {
		a := c.p.words[r.from:r.to]
		by, _ := addend(r.cmd, a)
		c.adding(k, by)
		c.keys.b = AppendKey(c.keys.b, c.db, a[1])
		c.keys.end()
		order[k] = uint8(k)
	}
	keys := c.keys.all()
	slices.SortStableFunc(order[:n], func(a, b uint8) int { return bytes.Compare(keys[a], keys[b]) })
	c.writes = c.writes[:0]
	for _, k := range order[:n] {
		c.writes = append(c.writes, btree.Write{Key: keys[k], Edit: c.addings[k].edit})
	}
	c.each(func(at int, w *btree.Write) {
		m := c.addings[order[at]]
		m.err = c.amended(&m.amendment, w.Key[1:], w.Err)
	})
	for _, m := range c.addings[:n] {
		if m.err != nil {
			c.fail(c.explain(m.err))
			c.failed++
		} else {
			c.integer(m.sum)
		}
	}
}

// add makes the next value of a string.
func (m *adding) add(r *record, b []byte) (_ []byte, err error) {
	if err := r.is(kindString); err != nil {
		return nil, err
	}
	m.sum = 0
	if r.kind == kindString {
		var ok bool
		if m.sum, ok = parseInt(r.value); !ok {
			return nil, errNotInteger
		}
	}
	if m.sum, err = plus(m.sum, m.by); err != nil {
		return nil, err
	}
	return strconv.AppendInt(appendHead(b, kindString, r.ttl()), m.sum, 10), nil
}
