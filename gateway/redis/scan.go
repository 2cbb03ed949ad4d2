package redis

import (
	"bytes"
	"math/rand/v2"
	"strconv"
	"sync"
)

// maxCursors is how many walks a gateway remembers at once.
const maxCursors = 16 << 10

// cursors map the numbers that SCAN and HSCAN use as cursors to positions in the tree, which are keys.
type cursors struct {
	mu    sync.Mutex        // guards at and order
	at    map[uint64][]byte // where the scan goes on
	order []uint64          // the oldest first
}

// keep stores a position and returns its cursor.
func (s *cursors) keep(key []byte) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[uint64][]byte{}
	}
	if len(s.order) >= maxCursors {
		for _, id := range s.order[:maxCursors/4] {
			delete(s.at, id)
		}
		s.order = append(s.order[:0], s.order[maxCursors/4:]...)
	}
	for {
		// Not above 2^53: some clients keep it as a floating point number.
		id := 1 + rand.Uint64N(1<<53-1)
		if s.at[id] == nil {
			s.at[id] = bytes.Clone(key)
			s.order = append(s.order, id)
			return id
		}
	}
}

// place is the position of a cursor.
func (s *cursors) place(id uint64) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at[id]
}

// scanOptions of SCAN and HSCAN.
type scanOptions struct {
	from    []byte // key of the tree; nil: from the start
	pattern []byte // glob of MATCH; nil: all
	count   int    // of COUNT: keys to look at
	kind    string // of TYPE; "": all
}

// cursor reads a cursor; nothing is 0.
func cursor(b []byte) (uint64, error) {
	if len(b) == 0 {
		return 0, nil
	}
	id, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 0, errCursor
	}
	return id, nil
}

// Options of SCAN, HSCAN and ZSCAN behind the cursor; TYPE only where kinds is set. A cursor is a number that this
// gateway gave out for a place in the order of keys; it is refused after the gateway has forgotten it.
func (c *conn) scanOptions(id uint64, a [][]byte, kinds bool) (o scanOptions, err error) {
	o.count = 10
	for i := 0; i < len(a); i += 2 {
		switch opt := lowered(a[i]); {
		case i+1 == len(a):
			return o, errSyntax
		case opt == "count":
			n, ok := parseInt(a[i+1])
			if !ok {
				return o, errNotInteger
			}
			if n < 1 {
				return o, errSyntax
			}
			o.count = int(min(n, 1<<20))
		case opt == "match":
			o.pattern = a[i+1]
		case opt == "type" && kinds:
			o.kind = lowered(a[i+1])
		default:
			return o, errSyntax
		}
	}
	if id != 0 {
		if o.from = c.s.cursors.place(id); o.from == nil {
			return o, fault("ERR invalid cursor: this gateway does not know it, or not any more; begin again at 0")
		}
	}
	return o, nil
}

// scanReply answers with a cursor and what was appended since mark.
func (c *conn) scanReply(mark, n int, next []byte) {
	c.precede(mark, c.array, n)
	id := uint64(0)
	if next != nil {
		id = c.s.cursors.keep(next)
	}
	end := len(c.out)
	c.array(2)
	c.text(strconv.FormatUint(id, 10))
	head := bytes.Clone(c.out[end:])
	copy(c.out[mark+len(head):], c.out[mark:end])
	copy(c.out[mark:], head)
}

// SCAN cursor [MATCH pattern] [COUNT n] [TYPE kind]. COUNT bounds the keys that are looked at, not those that
// match. The next place is the last key that was looked at with a NUL appended: the first key behind it.
func scan(c *conn, a [][]byte) error {
	from, err := cursor(a[1])
	if err != nil {
		return err
	}
	o, err := c.scanOptions(from, a[2:], true)
	if err != nil {
		return err
	}
	mark, seen, n := len(c.out), 0, 0
	var next []byte
	err = c.walk(o.from, o.pattern, o.count, func(key []byte, r *record) bool {
		if seen++; seen == o.count {
			next = append(bytes.Clone(key), 0)
		}
		if r != nil && (o.kind == "" || o.kind == kindNames[r.kind]) {
			n++
			c.bulk(key[1:])
		}
		return true
	})
	if err == nil {
		c.scanReply(mark, n, next)
	}
	return err
}

// HSCAN key cursor [MATCH pattern] [COUNT n]. An absent key is an empty hash.
func hscan(c *conn, a [][]byte) error {
	from, err := cursor(a[2])
	if err != nil {
		return err
	}
	return c.read(a[1], kindHash, func(id uint64) (missed bool, err error) {
		if id == 0 {
			c.scanReply(len(c.out), 0, nil)
			return false, nil
		}
		o, err := c.scanOptions(from, a[3:], false)
		if err != nil {
			return false, err
		}
		return true, c.hscan(id, &o)
	})
}

// hscan answers with some fields of an id.
func (c *conn) hscan(id uint64, o *scanOptions) error {
	mark, seen, n := len(c.out), 0, 0
	var next []byte
	r := within(appendID(nil, fieldFamily, id))
	if o.from != nil {
		// The key may have been given another id since: fields that both have are met once.
		if r.From = r.To; len(o.from) > idBytes && o.from[0] == fieldFamily {
			r.From = appendField(nil, id, o.from[1+idBytes:])
		}
	}
	r.Limit = o.count
	err := c.s.tree.Scan(c.s.ctx, r, func(key, value []byte, _ uint64) bool {
		if seen++; seen == o.count || c.tooMuch(mark) {
			next = append(bytes.Clone(key), 0)
		}
		if field := key[1+idBytes:]; o.pattern == nil || string(o.pattern) == "*" || match(o.pattern, field, false) {
			n += 2
			c.bulk(field)
			c.bulk(value)
		}
		return next == nil
	})
	if err == nil {
		c.scanReply(mark, n, next)
	}
	return err
}
