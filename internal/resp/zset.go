package resp

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/btree"
)

// zaddFlags are the options of ZADD.
type zaddFlags struct{ nx, xx, gt, lt, ch, incr bool }

func zadd(c *conn, a [][]byte) error {
	var f zaddFlags
	i := 2
options:
	for ; i < len(a); i++ {
		switch lowered(a[i]) {
		case "nx":
			f.nx = true
		case "xx":
			f.xx = true
		case "gt":
			f.gt = true
		case "lt":
			f.lt = true
		case "ch":
			f.ch = true
		case "incr":
			f.incr = true
		default:
			break options
		}
	}
	pairs := a[i:]
	if len(pairs) == 0 || len(pairs)%2 != 0 {
		return errSyntax
	}
	if f.nx && f.xx {
		return fault("ERR XX and NX options at the same time are not compatible")
	}
	if f.gt && f.nx || f.lt && f.nx || f.gt && f.lt {
		return fault("ERR GT, LT, and/or NX options at the same time are not compatible")
	}
	if f.incr && len(pairs) > 2 {
		return fault("ERR INCR option supports a single increment-element pair")
	}
	scores := make([]float64, len(pairs)/2)
	for i := range scores {
		var ok bool
		if scores[i], ok = parseFloat(pairs[2*i]); !ok {
			return errNotFloat
		}
	}
	if err := c.checkFields(pairs[1:], 2); err != nil {
		return err
	}
	var added, changed int
	var last *float64
	err := c.within(a[1], kindZset, !f.xx, func(id uint64) (wrote bool, err error) {
		added, changed, last = 0, 0, nil
		if id == 0 {
			return false, nil
		}
		for i, score := range scores {
			p, err := c.place(id, pairs[2*i+1], score, f)
			if err != nil {
				return wrote, err
			}
			wrote = wrote || p.added || p.changed
			if p.added {
				added++
			}
			if p.added || p.changed {
				changed++
			}
			if !p.refused {
				last = &p.score
			}
		}
		return wrote, nil
	})
	switch {
	case err != nil:
		return err
	case f.incr && last == nil:
		c.null()
	case f.incr:
		c.double(*last)
	case f.ch:
		c.integer(int64(changed))
	default:
		c.integer(int64(added))
	}
	return nil
}

type placed struct {
	score                   float64
	added, changed, refused bool
}

// member reads a member's score; version 0 if it is not there.
func (c *conn) member(id uint64, member []byte) (float64, uint64, error) {
	value, version, err := c.field(id, member)
	if err != nil || version == 0 {
		return 0, 0, err
	}
	if len(value) != 8 {
		return 0, 0, errRecord
	}
	return math.Float64frombits(binary.BigEndian.Uint64(value)), version, nil
}

// place gives a member its score. See invariant 2 for the order of writes.
//
// Linearizes at: the PutIf of the member's score.
func (c *conn) place(id uint64, member []byte, score float64, f zaddFlags) (p placed, err error) {
	for try := range maxTries {
		old, version, err := c.member(id, member)
		if err != nil {
			return p, err
		}
		p = placed{score: score}
		switch {
		case version == 0 && f.xx, version != 0 && f.nx:
			p.refused = true
			return p, nil
		case version == 0:
			p.added = true
		default:
			if f.incr {
				if p.score += old; math.IsNaN(p.score) {
					return p, fault("ERR resulting score is not a number (NaN)")
				}
			}
			if f.gt && p.score <= old || f.lt && p.score >= old {
				p.refused, p.score = true, old
				return p, nil
			}
			if p.changed = p.score != old; !p.changed {
				return p, nil
			}
		}
		// Also if the place is there already: its version tells those who would remove
		// it that it is wanted.
		at := appendPlace(nil, id, p.score, member)
		mine, err := c.s.tree.PutIf(c.s.ctx, at, nil, btree.Cond{})
		if err != nil {
			return p, err
		}
		var leave []byte
		var left uint64
		if version != 0 {
			leave = appendPlace(nil, id, old, member)
			if left, err = c.s.versionOf(leave); err != nil {
				return p, err
			}
		}
		c.enc = binary.BigEndian.AppendUint64(c.enc[:0], math.Float64bits(p.score))
		c.key2 = appendField(c.key2[:0], id, member)
		_, err = c.s.tree.PutIf(c.s.ctx, c.key2, c.enc, fieldCond(version))
		if lost(err) {
			if err := c.unplace(at, mine); err != nil {
				return p, err
			}
			pause(try)
			continue
		}
		if err == nil {
			c.partly = true
			err = c.unplace(leave, left)
		}
		return p, err
	}
	return p, errContended
}

// versionOf is the version of a key, 0 if it is not there.
func (s *Server) versionOf(key []byte) (uint64, error) {
	_, version, err := s.tree.GetVersion(s.ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return 0, nil
	}
	return version, err
}

// unplace removes a place in the order, unless somebody wants it since.
func (c *conn) unplace(key []byte, version uint64) error {
	if version == 0 {
		return nil
	}
	if err := c.s.tree.DeleteIf(c.s.ctx, key, btree.IfVersion(version)); err != nil && !lost(err) {
		return err
	}
	return nil
}

func zrem(c *conn, a [][]byte) error { return c.removeAll(a, kindZset, c.unmember) }

// unmember removes a member.
func (c *conn) unmember(id uint64, member []byte) (bool, error) {
	for try := range maxTries {
		score, version, err := c.member(id, member)
		if err != nil || version == 0 {
			return false, err
		}
		leave := appendPlace(nil, id, score, member)
		left, err := c.s.versionOf(leave)
		if err != nil {
			return false, err
		}
		c.key2 = appendField(c.key2[:0], id, member)
		if err = c.s.tree.DeleteIf(c.s.ctx, c.key2, btree.IfVersion(version)); err == nil {
			return true, c.unplace(leave, left)
		}
		if !lost(err) {
			return false, err
		}
		pause(try)
	}
	return false, errContended
}

func zscore(c *conn, a [][]byte) error {
	id, err := c.family(a[1], kindZset)
	if err != nil {
		return err
	}
	if id == 0 || len(a[2]) > c.s.maxFieldBytes() {
		c.null()
		return nil
	}
	score, version, err := c.member(id, a[2])
	if err == nil && version == 0 {
		c.null()
	} else if err == nil {
		c.double(score)
	}
	return err
}
