package redis

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// zaddFlags are the options of ZADD.
type zaddFlags struct{ nx, xx, gt, lt, ch, incr bool }

// set sets the flag of an option; false if the word is no option.
func (f *zaddFlags) set(option string) bool {
	switch option {
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
		return false
	}
	return true
}

// check refuses options that exclude each other, with the messages of Redis.
func (f *zaddFlags) check(members int) error {
	switch {
	case f.nx && f.xx:
		return fault("ERR XX and NX options at the same time are not compatible")
	case f.gt && f.nx || f.lt && f.nx || f.gt && f.lt:
		return fault("ERR GT, LT, and/or NX options at the same time are not compatible")
	case f.incr && members > 1:
		return fault("ERR INCR option supports a single increment-element pair")
	}
	return nil
}

// zaddPairs are the options, the pairs of score and member, and the scores of a ZADD.
func zaddPairs(a [][]byte) (f zaddFlags, pairs [][]byte, scores []float64, err error) {
	i := 2
	for i < len(a) && f.set(lowered(a[i])) {
		i++
	}
	if pairs = a[i:]; len(pairs) == 0 || len(pairs)%2 != 0 {
		return f, nil, nil, errSyntax
	}
	scores = make([]float64, len(pairs)/2)
	if err := f.check(len(scores)); err != nil {
		return f, nil, nil, err
	}
	for i := range scores {
		var ok bool
		if scores[i], ok = parseFloat(pairs[2*i]); !ok {
			return f, nil, nil, errNotFloat
		}
	}
	return f, pairs, scores, nil
}

func zadd(c *conn, a [][]byte) error {
	f, pairs, scores, err := zaddPairs(a)
	if err != nil {
		return err
	}
	if err := c.checkFields(pairs[1:], 2); err != nil {
		return err
	}
	var sum added
	// With XX each member is a try of its own: the try that repeats a missed member under
	// another id must not repeat the members that an earlier try has written.
	each := len(scores)
	if f.xx {
		each = 1
	}
	for from := 0; from < len(scores); from += each {
		n, err := c.places(a[1], pairs[2*from:2*(from+each)], scores[from:from+each], f)
		if err != nil {
			return err
		}
		sum.new, sum.changed, sum.last = sum.new+n.new, sum.changed+n.changed, n.last
	}
	switch {
	case f.incr && sum.last == nil:
		c.null()
	case f.incr:
		c.double(*sum.last)
	case f.ch:
		c.integer(int64(sum.changed))
	default:
		c.integer(int64(sum.new))
	}
	return nil
}

// added is what ZADD has done.
type added struct {
	new     int      // members
	changed int      // members whose score is another now, and new ones
	last    *float64 // the score of the last member; nil: an option refused to change it
}

// places gives members their scores.
func (c *conn) places(key []byte, pairs [][]byte, scores []float64, f zaddFlags) (n added, err error) {
	err = c.within(key, kindZset, !f.xx, func(id uint64) (did effect, err error) {
		n = added{}
		if id == 0 {
			return effectNone, nil
		}
		for i, score := range scores {
			p, err := c.place(id, pairs[2*i+1], score, f)
			if err != nil {
				return did, err
			}
			if p.added {
				n.new++
			}
			switch {
			case p.added || p.changed:
				n.changed++
				did = effectWrote
			case p.missed && did == effectNone:
				did = effectMissed
			}
			if !p.refused {
				n.last = &p.score
			}
		}
		return did, nil
	})
	return n, err
}

// placed is what place has done.
type placed struct {
	score   float64 // of the member
	added   bool    // the member was not there
	changed bool    // the member was there, with another score
	refused bool    // an option kept the member as it was
	missed  bool    // refused because the member was not there
}

// scoreBytes is the length of a score; a member with a shorter value is claimed and not
// there yet.
const scoreBytes = 8

// member reads a member's score; there is false if it is not there, version 0 if it is not
// claimed either.
func (c *conn) member(id uint64, member []byte) (score float64, version uint64, there bool, err error) {
	value, version, err := c.field(id, member)
	if err != nil || version == 0 {
		return 0, 0, false, err
	}
	score, there, err = decodeScore(value)
	return score, version, there, err
}

func decodeScore(value []byte) (score float64, there bool, err error) {
	switch len(value) {
	case 0:
		return 0, false, nil
	case scoreBytes:
		return math.Float64frombits(binary.BigEndian.Uint64(value)), true, nil
	}
	return 0, false, errRecord
}

// claim reads a member's score, or claims the member if it is not there and make is set.
// version is that of the score or of the claim.
func (c *conn) claim(id uint64, member []byte, make bool) (score float64, version uint64, there bool, err error) {
	c.key2 = appendField(c.key2[:0], id, member)
	var bad error
	mine, err := c.s.tree.EditVersion(c.s.ctx, c.key2, func(old []byte, v uint64) ([]byte, bool, error) {
		version = v
		if score, there, bad = decodeScore(old); bad != nil || there || !make {
			return nil, false, errLeave
		}
		return nil, false, nil
	})
	switch {
	case err == errLeave:
		return score, version, there, bad
	case err == nil:
		return 0, mine, false, nil
	case !errors.Is(err, kv.ErrNoEdit):
		return 0, 0, false, err
	}
	for try := range maxTries {
		if score, version, there, err = c.member(id, member); err != nil || there || !make {
			return score, version, there, err
		}
		if mine, err = c.s.tree.PutIf(c.s.ctx, c.key2, nil, fieldCond(version)); !lost(err) {
			return 0, mine, false, err
		}
		pause(try)
	}
	return 0, 0, false, errContended
}

// placement is a place in the order, as it was put or read.
type placement struct {
	key     []byte // of the tree
	version uint64 // of that record
}

// place gives a member its score. See invariant 2 for the order of writes.
//
// Linearizes at: the PutIf of the member's score.
func (c *conn) place(id uint64, member []byte, score float64, f zaddFlags) (p placed, err error) {
	var stale []placement // that tries which failed have put
	for try := range maxTries {
		old, base, there, err := c.claim(id, member, !f.xx)
		if err != nil {
			return p, err
		}
		p = placed{score: score}
		switch {
		case !there && f.xx, there && f.nx:
			p.refused, p.missed = true, !there
			c.forsake(id, member, old, base, there, stale)
			return p, nil
		case !there:
			p.added = true
		default:
			if f.incr {
				if p.score += old; math.IsNaN(p.score) {
					return p, fault("ERR resulting score is not a number (NaN)")
				}
			}
			if f.gt && p.score <= old || f.lt && p.score >= old {
				p.refused, p.score = true, old
			}
			if p.changed = p.score != old; !p.changed {
				c.forsake(id, member, old, base, there, stale)
				return p, nil
			}
		}
		// Put the place also if it exists: the new version makes a conditional removal by
		// another command fail.
		at := appendPlace(nil, id, p.score, member)
		mine, err := c.s.tree.PutIf(c.s.ctx, at, nil, btree.Cond{})
		if err != nil {
			return p, err
		}
		var leave placement
		if there {
			leave.key = appendPlace(nil, id, old, member)
			if leave.version, err = c.s.versionOf(leave.key); err != nil {
				return p, err
			}
		}
		c.enc = binary.BigEndian.AppendUint64(c.enc[:0], math.Float64bits(p.score))
		c.key2 = appendField(c.key2[:0], id, member)
		version, err := c.s.tree.PutIf(c.s.ctx, c.key2, c.enc, btree.IfVersion(base))
		if lost(err) {
			stale = append(stale, placement{at, mine})
			pause(try)
			continue
		}
		if err == nil {
			if !there {
				base = 0 // a claim is no member: readers take it for absent
			}
			c.written = append(c.written, written{member, version, base})
			c.s.leave(c.unplace(append(stale, leave), at))
		}
		return p, err
	}
	return p, errContended
}

// forsake removes places that failed tries have put, when the member stays as it is. A
// place may be removed only behind a change of the member; so the member is written anew.
func (c *conn) forsake(id uint64, member []byte, score float64, version uint64, there bool, stale []placement) {
	if len(stale) == 0 || !there {
		return
	}
	c.enc = binary.BigEndian.AppendUint64(c.enc[:0], math.Float64bits(score))
	c.key2 = appendField(c.key2[:0], id, member)
	_, err := c.s.tree.PutIf(c.s.ctx, c.key2, c.enc, btree.IfVersion(version))
	if err == nil {
		err = c.unplace(stale, appendPlace(nil, id, score, member))
	}
	c.s.leave(ignoreLost(err)) // readers ignore a place that no score confirms
}

// versionOf is the version of a key, 0 if it is not there.
func (s *Server) versionOf(key []byte) (uint64, error) {
	_, version, err := s.tree.GetVersion(s.ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return 0, nil
	}
	return version, err
}

// unplace removes places that still have the version in the list, all but the key but.
//
// Preconditions: the caller has changed the member's score after it put or read the places.
// See invariant 2.
func (c *conn) unplace(places []placement, but []byte) error {
	for _, p := range places {
		if p.version == 0 || bytes.Equal(p.key, but) {
			continue
		}
		if err := c.s.tree.DeleteIf(c.s.ctx, p.key, btree.IfVersion(p.version)); err != nil && !lost(err) {
			return err
		}
	}
	return nil
}

func zrem(c *conn, a [][]byte) error { return c.removeAll(a, kindZset, c.unmember) }

// unmember removes a member.
func (c *conn) unmember(id uint64, member []byte) (bool, error) {
	for try := range maxTries {
		score, version, there, err := c.member(id, member)
		if err != nil || !there {
			return false, err
		}
		leave := placement{key: appendPlace(nil, id, score, member)}
		if leave.version, err = c.s.versionOf(leave.key); err != nil {
			return false, err
		}
		c.key2 = appendField(c.key2[:0], id, member)
		if err = c.s.tree.DeleteIf(c.s.ctx, c.key2, btree.IfVersion(version)); err == nil {
			c.s.leave(c.unplace([]placement{leave}, nil))
			return true, nil
		}
		if !lost(err) {
			return false, err
		}
		pause(try)
	}
	return false, errContended
}

func zscore(c *conn, a [][]byte) error {
	return c.read(a[1], kindZset, func(id uint64) (missed bool, err error) {
		if id == 0 || len(a[2]) > c.s.maxFieldBytes() {
			c.null()
			return false, nil
		}
		score, _, there, err := c.member(id, a[2])
		if err == nil && !there {
			c.null()
		} else if err == nil {
			c.double(score)
		}
		return !there, err
	})
}
