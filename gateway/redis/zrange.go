package redis

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/btree"
)

// bound is an end of a range of scores or members.
type bound struct {
	open  bool    // the end itself is excluded
	score float64 // of a range of scores
	edge  int     // of members: -1 before all, 1 behind all
	at    []byte  // member, where edge is 0
}

// One end of a range of scores: a number, or (number, which excludes it; -inf and +inf are numbers.
func scoreBound(b []byte) (e bound, err error) {
	if len(b) > 0 && b[0] == '(' {
		e.open, b = true, b[1:]
	}
	var ok bool
	if e.score, ok = parseLimit(b); !ok {
		return e, fault("ERR min or max is not a float")
	}
	return e, nil
}

// One end of a range of members: - and + are the ends of all, [ includes the member and ( excludes it.
func lexBound(b []byte) (e bound, err error) {
	switch {
	case string(b) == "-":
		e.edge = -1
	case string(b) == "+":
		e.edge = 1
	case len(b) > 0 && (b[0] == '(' || b[0] == '['):
		e.open, e.at = b[0] == '(', b[1:]
	default:
		return e, fault("ERR min or max not valid string range item")
	}
	return e, nil
}

// zquery is the query of a ZRANGE or of one of the commands that it replaces.
type zquery struct {
	by            string // "": by rank, "score", "lex"
	rev, scores   bool   // from the highest; with scores in the reply
	offset, limit int64  // limit < 0: all
	from, to      []byte // arguments

	first, last int64 // by rank
	low, high   bound // otherwise
}

// ranged makes a command that ZRANGE replaces: it has what it ranges by, and its direction, in its name.
func ranged(by string, rev bool) func(c *conn, a [][]byte) error {
	return func(c *conn, a [][]byte) error {
		q := zquery{by: by, rev: rev, limit: -1, from: a[2], to: a[3]}
		if err := q.options(a[4:], false); err != nil {
			return err
		}
		return c.zrange(a[1], &q)
	}
}

// counted makes ZCOUNT and ZLEXCOUNT, which visit what they count.
func counted(by string) func(c *conn, a [][]byte) error {
	return func(c *conn, a [][]byte) error {
		q := zquery{by: by, limit: -1, from: a[2], to: a[3]}
		if err := q.parse(); err != nil {
			return err
		}
		return c.read(a[1], kindZset, func(id uint64) (missed bool, err error) {
			n := int64(0)
			if id != 0 {
				r, _, _, err := c.span(id, &q)
				if err != nil {
					return false, err
				}
				if bytes.Compare(r.From, r.To) < 0 {
					err = c.eachMember(id, r, by, func([]byte, float64) bool { n++; return true })
				}
				if err != nil {
					return false, err
				}
			}
			c.integer(n)
			return true, nil
		})
	}
}

func zrange(c *conn, a [][]byte) error {
	q := zquery{limit: -1, from: a[2], to: a[3]}
	if err := q.options(a[4:], true); err != nil {
		return err
	}
	return c.zrange(a[1], &q)
}

// Options behind the two ends. REV, BYLEX and BYSCORE belong to ZRANGE alone (full); the older commands have
// them in their names.
func (q *zquery) options(a [][]byte, full bool) error {
	limited := false
	for i := 0; i < len(a); i++ {
		switch opt := lowered(a[i]); {
		case opt == "withscores":
			q.scores = true
		case opt == "limit" && i+2 < len(a):
			var ok1, ok2 bool
			q.offset, ok1 = parseInt(a[i+1])
			q.limit, ok2 = parseInt(a[i+2])
			if !ok1 || !ok2 {
				return errNotInteger
			}
			limited = true
			i += 2
		case full && opt == "rev":
			q.rev = true
		case full && opt == "bylex" && q.by == "":
			q.by = "lex"
		case full && opt == "byscore" && q.by == "":
			q.by = "score"
		default:
			return errSyntax
		}
	}
	if limited && q.limit != -1 && q.by == "" {
		return fault("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
	}
	if q.scores && q.by == "lex" {
		return fault("ERR syntax error, WITHSCORES not supported in combination with BYLEX")
	}
	return nil
}

// The members of a range. What is not found may have been removed with the id of a set that was replaced: the
// function reports that, and read looks at the key again.
func (c *conn) zrange(key []byte, q *zquery) error {
	if err := q.parse(); err != nil {
		return err
	}
	return c.read(key, kindZset, func(id uint64) (missed bool, err error) {
		if id == 0 || q.offset < 0 {
			c.array(0)
			return false, nil
		}
		r, offset, limit, err := c.span(id, q)
		if err != nil {
			return false, err
		}
		if limit == 0 || r.To != nil && bytes.Compare(r.From, r.To) >= 0 {
			c.array(0)
			return q.by == "", nil
		}
		r.Reverse = q.rev
		return true, c.members(id, r, q, offset, limit)
	})
}

// parse reads the ends of the range.
func (q *zquery) parse() (err error) {
	from, to := q.from, q.to
	if q.rev && q.by != "" {
		from, to = to, from
	}
	switch q.by {
	case "score":
		if q.low, err = scoreBound(from); err == nil {
			q.high, err = scoreBound(to)
		}
	case "lex":
		if q.low, err = lexBound(from); err == nil {
			q.high, err = lexBound(to)
		}
	default:
		var ok1, ok2 bool
		q.first, ok1 = parseInt(from)
		if q.last, ok2 = parseInt(to); !ok1 || !ok2 {
			return errNotInteger
		}
	}
	return err
}

// span is the range of the tree for a query of an id, and which of the members in it are
// asked for.
func (c *conn) span(id uint64, q *zquery) (r btree.Range, offset, limit int64, err error) {
	switch q.by {
	case "score":
		return scoreRange(id, q.low, q.high), q.offset, q.limit, nil
	case "lex":
		return lexRange(id, q.low, q.high), q.offset, q.limit, nil
	}
	first, last := q.first, q.last
	if first < 0 || last < 0 {
		n, err := c.s.count(c.s.ctx, id, kindZset)
		if err != nil {
			return r, 0, 0, err
		}
		if first < 0 {
			first = max(0, int64(n)+first)
		}
		if last < 0 {
			last += int64(n)
		}
	}
	if first > last {
		return r, 0, 0, nil
	}
	return within(appendID(nil, orderFamily, id)), first, last - first + 1, nil
}

// scoreRange is the part of the order with scores between two bounds.
func scoreRange(id uint64, from, to bound) btree.Range {
	low, high := appendPlace(nil, id, from.score, nil), appendPlace(nil, id, to.score, nil)
	if from.open {
		low = after(low)
	}
	if !to.open {
		high = after(high)
	}
	return btree.Range{From: low, To: high}
}

// lexRange are the members between two bounds.
func lexRange(id uint64, from, to bound) btree.Range {
	r := within(appendID(nil, fieldFamily, id))
	ends := r
	place := func(e bound, behind bool) []byte {
		switch e.edge {
		case -1:
			return ends.From
		case 1:
			return ends.To
		}
		b := appendField(nil, id, e.at)
		if behind {
			b = append(b, 0) // the least key that is greater
		}
		return b
	}
	return btree.Range{From: place(from, from.open), To: place(to, !to.open)}
}

// membersBatch is how many places are compared with their members' scores at once.
const membersBatch = 128

// members answers with the members of a range: limit of them, or all if it is negative,
// behind the first offset.
func (c *conn) members(id uint64, r btree.Range, q *zquery, offset, limit int64) error {
	mark, n := len(c.out), int64(0)
	each := func(member []byte, score float64) bool {
		if offset > 0 {
			offset--
			return true
		}
		if q.scores && c.proto >= 3 {
			c.array(2)
		}
		c.bulk(member)
		if q.scores {
			c.double(score)
		}
		n++
		return (limit < 0 || n < limit) && !c.tooMuch(mark)
	}
	err := c.eachMember(id, r, q.by, each)
	if err == nil && c.tooMuch(mark) {
		err = errReply
	}
	if err != nil {
		return err
	}
	if q.scores && c.proto < 3 {
		n *= 2
	}
	c.precede(mark, c.array, int(n))
	return nil
}

// eachMember calls f with the members of a range, until it says false. Ranges by members have no scores: 0.
func (c *conn) eachMember(id uint64, r btree.Range, by string, f func(member []byte, score float64) bool) error {
	if by != "lex" {
		return c.inOrder(id, r, f)
	}
	return c.s.tree.Scan(c.s.ctx, r, func(key, value []byte, _ uint64) bool {
		return len(value) != scoreBytes || f(key[1+idBytes:], 0)
	})
}

// inOrder calls f with members in the order of their scores. Places that do not
// agree with the member's score are passed over.
func (c *conn) inOrder(id uint64, r btree.Range, f func(member []byte, score float64) bool) error {
	const head = 1 + 2*idBytes
	for {
		keys, err := c.s.some(c.s.ctx, r, membersBatch)
		if err != nil {
			return err
		}
		c.keys.reset()
		scores := make([]uint64, len(keys))
		for i, key := range keys {
			if len(key) < head {
				return errRecord
			}
			scores[i] = binary.BigEndian.Uint64(key[1+idBytes:])
			c.keys.b = appendField(c.keys.b, id, key[head:])
			c.keys.end()
		}
		ok := make([]bool, len(keys))
		var bad error
		err = c.s.tree.GetMany(c.s.ctx, c.keys.all(), func(i int, value []byte, _ uint64, err error) {
			switch {
			case errors.Is(err, btree.ErrNoKey):
			case err != nil:
				bad = err
			default:
				ok[i] = len(value) == 8 && orderBits(math.Float64frombits(binary.BigEndian.Uint64(value))) == scores[i]
			}
		})
		if err == nil {
			err = bad
		}
		if err != nil {
			return err
		}
		for i, key := range keys {
			if ok[i] && !f(key[head:], fromOrderBits(scores[i])) {
				return nil
			}
		}
		if len(keys) < membersBatch {
			return nil
		}
		if end := keys[len(keys)-1]; r.Reverse {
			r.To = end
		} else {
			r.From = append(end, 0)
		}
	}
}
