package redis

import (
	"bytes"
	"math"
	"math/rand/v2"

	"github.com/quarrystore/quarry/btree"
)

// EXISTS key [key ...]. A key that is named twice counts twice, as in Redis.
func exists(c *conn, a [][]byte) error {
	n := 0
	for _, key := range a[1:] {
		r, err := c.load(key)
		if err != nil {
			return err
		}
		if r.kind != kindNone {
			n++
			c.hits++
		} else {
			c.misses++
		}
	}
	c.integer(int64(n))
	return nil
}

func del(c *conn, a [][]byte) error    { return c.del(a[1:], false) }
func unlink(c *conn, a [][]byte) error { return c.del(a[1:], true) }

// del removes keys one after the other and replies with how many there were. After an error those before it are
// gone, which the progress of the command notes.
func (c *conn) del(keys [][]byte, lazy bool) error {
	n := 0
	for _, key := range keys {
		ok, err := c.remove(key, lazy)
		if err != nil {
			return err
		}
		if ok {
			n++
			c.did.part = true
		}
	}
	c.integer(int64(n))
	return nil
}

func typeOf(c *conn, a [][]byte) error {
	r, err := c.load(a[1])
	if err == nil {
		c.status(kindNames[r.kind])
	}
	return err
}

func expire(c *conn, a [][]byte) error   { return c.expire(a, c.now, 1000, "expire") }
func pexpire(c *conn, a [][]byte) error  { return c.expire(a, c.now, 1, "pexpire") }
func expireat(c *conn, a [][]byte) error { return c.expire(a, 0, 1000, "expireat") }

// expireOptions are the conditions of EXPIRE and its like: only if the key has no expiry, has one,
// and if the new expiry is later or earlier. A key without an expiry counts as never expiring.
type expireOptions struct{ nx, xx, gt, lt bool }

// NX excludes the other options, and GT excludes LT; XX goes with either.
func (o *expireOptions) parse(a [][]byte) error {
	for _, opt := range a {
		switch lowered(opt) {
		case "nx":
			o.nx = true
		case "xx":
			o.xx = true
		case "gt":
			o.gt = true
		case "lt":
			o.lt = true
		default:
			return fault("ERR Unsupported option " + string(word(opt, 1024)))
		}
	}
	if o.nx && (o.xx || o.gt || o.lt) {
		return fault("ERR NX and XX, GT or LT options at the same time are not compatible")
	}
	if o.gt && o.lt {
		return fault("ERR GT and LT options at the same time are not compatible")
	}
	return nil
}

// allow says whether a key that expires at had (0: never) may get the expiry t instead.
func (o *expireOptions) allow(had, t int64) bool {
	switch {
	case o.nx && had != 0, o.xx && had == 0:
		return false
	case o.gt && (had == 0 || t <= had), o.lt && had != 0 && t >= had:
		return false
	}
	return true
}

// expire sets the expiry of a key to base ms plus a[2] units of unit ms. name is the command in
// errors.
func (c *conn) expire(a [][]byte, base, unit int64, name string) error {
	var o expireOptions
	if err := o.parse(a[3:]); err != nil {
		return err
	}
	t, ok := parseInt(a[2])
	if !ok {
		return errNotInteger
	}
	bad := fault("ERR invalid expire time in '" + name + "' command")
	if t > math.MaxInt64/unit || t < math.MinInt64/unit {
		return bad
	}
	if t *= unit; t > math.MaxInt64-base {
		return bad
	}
	t += base
	done := false
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		done = r.kind != kindNone && o.allow(r.ttl(), t)
		switch {
		case !done:
			return nil, errLeave
		case t <= c.now:
			return nil, errRemove
		}
		return r.retimed(b, t), nil
	})
	if err == nil {
		c.flag(done)
	}
	return err
}

// retimed appends the record with another expiry.
func (r *record) retimed(b []byte, expiry int64) []byte {
	switch {
	case r.raw:
		return append(appendRaw(b, expiry), r.value...)
	case r.kind == kindString:
		return append(appendHead(b, kindString, expiry), r.value...)
	}
	return appendFamily(b, r.kind, expiry, r.id)
}

func ttl(c *conn, a [][]byte) error {
	return c.remaining(a[1], func(ms int64) int64 { return (ms + 500) / 1000 })
}

func pttl(c *conn, a [][]byte) error { return c.remaining(a[1], func(ms int64) int64 { return ms }) }

// remaining replies with what is left until a key expires: -2 without a key, -1 without an expiry.
func (c *conn) remaining(key []byte, f func(ms int64) int64) error {
	r, err := c.load(key)
	switch {
	case err != nil:
		return err
	case r.kind == kindNone:
		c.integer(-2)
	case r.expiry == 0:
		c.integer(-1)
	default:
		c.integer(f(r.expiry - c.now))
	}
	return nil
}

// persist removes the expiry of a key.
func persist(c *conn, a [][]byte) error {
	done := false
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		if done = r.ttl() != 0; !done {
			return nil, errLeave
		}
		return r.retimed(b, 0), nil
	})
	if err == nil {
		c.flag(done)
	}
	return err
}

// walk calls f with the live keys of the database that match, in order, until it
// returns false. f does not keep its slices.
func (c *conn) walk(from, pattern []byte, limit int, f func(key []byte, r *record) bool) error {
	prefix := AppendKey(nil, c.db, literal(pattern))
	if pattern == nil {
		prefix = prefix[:1]
	}
	r := within(prefix)
	if bytes.Compare(from, r.From) > 0 {
		r.From = from
	}
	r.Limit = limit
	all := pattern == nil || string(pattern) == "*"
	var bad error
	err := c.s.tree.Scan(c.s.ctx, r, func(key, value []byte, version uint64) bool {
		rec, err := decode(value, version, c.now)
		if err != nil {
			bad = err
			return false
		}
		if rec.mark != 0 {
			if rec, err = c.load(key[1:]); err != nil {
				bad = err
				return false
			}
		}
		if rec.kind == kindNone || !all && !match(pattern, key[1:], false) {
			return f(key, nil)
		}
		return f(key, &rec)
	})
	if err == nil {
		err = bad
	}
	return err
}

// KEYS pattern. The length of the array is known only at the end and is put before the elements then. An
// answer above the limit of answers ends the walk with an error: SCAN has no such limit.
func keys(c *conn, a [][]byte) error {
	mark, n := len(c.out), 0
	err := c.walk(nil, a[1], 0, func(key []byte, r *record) bool {
		if r != nil {
			n++
			c.bulk(key[1:])
		}
		return !c.tooMuch(mark)
	})
	if err == nil && c.tooMuch(mark) {
		err = errReply
	}
	if err == nil {
		c.precede(mark, c.array, n)
	}
	return err
}

// randomkey is a key near a random place of the tree; not all keys are equally likely.
func randomkey(c *conn, _ [][]byte) error {
	key, err := c.random()
	if err == nil && key == nil {
		c.null()
	} else if err == nil {
		c.bulk(key[1:])
	}
	return err
}

// random finds a live key behind a random place between the first and the last.
// Keys behind large gaps are found more often than others.
func (c *conn) random() ([]byte, error) {
	all := within([]byte{byte(c.db)})
	ends := [2][]byte{}
	for i := range ends {
		r := all
		r.Limit, r.Reverse = 1, i == 1
		err := c.s.tree.Scan(c.s.ctx, r, func(key, _ []byte, _ uint64) bool { ends[i] = bytes.Clone(key); return false })
		if err != nil || ends[i] == nil {
			return nil, err
		}
	}
	from, to := ends[0], ends[1]
	n := 0
	for n < len(from) && n < len(to) && from[n] == to[n] {
		n++
	}
	at := bytes.Clone(from[:n])
	for i := range 8 {
		low, high := 0, 255
		if i == 0 && n < len(to) {
			if high = int(to[n]); n < len(from) {
				low = int(from[n])
			}
		}
		at = append(at, byte(low+rand.IntN(high-low+1)))
	}
	for _, start := range [][]byte{at, all.From} { // around the end
		var found []byte
		err := c.walk(start, nil, 0, func(key []byte, r *record) bool {
			if r != nil {
				found = bytes.Clone(key)
			}
			return found == nil
		})
		if err != nil || found != nil {
			return found, err
		}
	}
	return nil, nil
}

// dbsize counts the keys of a database, those past their expiry and not yet swept included.
func dbsize(c *conn, _ [][]byte) error {
	n, err := c.s.tree.Count(c.s.ctx, within([]byte{byte(c.db)}))
	if err == nil {
		c.integer(int64(n))
	}
	return err
}

// flushdb removes the keys of one database, flushall those of all: key by key, not at one
// instant.
func flushdb(c *conn, a [][]byte) error { return c.flushed(a, c.db, c.db) }

func flushall(c *conn, a [][]byte) error { return c.flushed(a, 0, Databases-1) }

// flushed removes the keys of some databases in batches. A key that is made meanwhile is removed if it lies ahead
// of the walk.
func (c *conn) flushed(a [][]byte, first, last int) error {
	if len(a) > 2 || len(a) == 2 && !equalFold(a[1], "async") && !equalFold(a[1], "sync") {
		return errSyntax
	}
	r := btree.Range{From: []byte{byte(first)}, To: []byte{byte(last + 1)}}
	for {
		some, err := c.s.some(c.s.ctx, r, dropBatch)
		if err != nil {
			return err
		}
		for _, key := range some {
			db := c.db
			c.db = int(key[0])
			_, err := c.removeAnything(key[1:])
			c.db = db
			if err != nil {
				return err
			}
			c.did.part = true
		}
		if len(some) < dropBatch {
			break
		}
		r.From = append(some[len(some)-1], 0)
	}
	c.ok()
	return nil
}

// removeAnything removes a key, expired or not.
func (c *conn) removeAnything(key []byte) (bool, error) {
	for try := range maxTries {
		r, err := c.load(key)
		if err != nil || r.version == 0 {
			return false, err
		}
		err = c.s.tree.DeleteIf(c.s.ctx, c.key, r.cond())
		if err == nil && r.id != 0 {
			c.s.leave(c.s.drop(c.s.ctx, r.id))
		}
		if !lost(err) {
			return true, err
		}
		pause(try)
	}
	return false, errContended
}

// rename moves a key's record at one instant: see move.go.
func rename(c *conn, a [][]byte) error {
	if _, err := c.move(a[1], a[2], false); err != nil {
		return err
	}
	c.ok()
	return nil
}

func renamenx(c *conn, a [][]byte) error {
	ok, err := c.move(a[1], a[2], true)
	if err == nil {
		c.flag(ok)
	}
	return err
}

// copyCmd is COPY. If the source is removed while it is copied, and another object stands at its key by then, that
// one is copied.
func copyCmd(c *conn, a [][]byte) error {
	db, replace := c.db, false
	for i := 3; i < len(a); i++ {
		switch {
		case equalFold(a[i], "replace"):
			replace = true
		case equalFold(a[i], "db") && i+1 < len(a):
			i++
			var err error
			if db, err = database(a[i]); err != nil {
				return err
			}
		default:
			return errSyntax
		}
	}
	if db == c.db && bytes.Equal(a[1], a[2]) {
		return fault("ERR source and destination objects are the same")
	}
	for try := range maxTries {
		r, err := c.load(a[1])
		if err != nil {
			return err
		}
		ok := r.kind != kindNone
		if ok {
			ok, err = c.duplicate(r, db, a[2], replace)
		}
		if err == errSourceGone {
			// If another command has put something else there, that is to be copied.
			var now record
			if now, err = c.load(a[1]); err == nil && now.kind != kindNone && now.id != r.id {
				pause(try)
				continue
			}
		}
		if err == nil {
			c.flag(ok)
		}
		return err
	}
	return errContended
}

// OBJECT ENCODING key answers what Redis would use for such a value. Clients and test suites ask; the store
// itself has one form for each kind.
func objectEncoding(c *conn, a [][]byte) error {
	r, err := c.load(a[2])
	if err != nil {
		return err
	}
	switch r.kind {
	case kindNone:
		c.null()
	case kindString:
		c.text(encoding(&r))
	default:
		small, err := c.listpack(r.id, r.kind)
		if err != nil {
			return err
		}
		name := map[byte]string{kindHash: "hashtable", kindZset: "skiplist"}[r.kind]
		if small {
			name = "listpack"
		}
		c.text(name)
	}
	return nil
}

// listpack says whether Redis would keep these fields in one piece.
func (c *conn) listpack(id uint64, kind byte) (bool, error) {
	name := kindNames[kind]
	most, long := c.s.settings.number(name+"-max-listpack-entries"), c.s.settings.number(name+"-max-listpack-value")
	r := within(appendID(nil, fieldFamily, id))
	r.Limit = most + 1
	n, small := 0, true
	err := c.s.tree.Scan(c.s.ctx, r, func(key, value []byte, _ uint64) bool {
		if kind == kindZset && len(value) != scoreBytes {
			return true // a claim
		}
		n++
		small = len(key)-1-idBytes <= long && (kind == kindZset || len(value) <= long)
		return small
	})
	return small && n <= most, err
}

// objectNumber answers with a number for a key that is there.
func objectNumber(n int64) func(*conn, [][]byte) error {
	return func(c *conn, a [][]byte) error {
		r, err := c.load(a[2])
		switch {
		case err != nil:
			return err
		case r.kind == kindNone:
			c.null()
		default:
			c.integer(n)
		}
		return nil
	}
}

// OBJECT FREQ fails as in a Redis without an LFU policy: no access frequencies are kept.
func objectFreq(c *conn, a [][]byte) error {
	r, err := c.load(a[2])
	if err == nil && r.kind == kindNone {
		c.null()
		return nil
	} else if err != nil {
		return err
	}
	return fault("ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that when switching between policies at runtime LRU and LFU data will take some time to adjust.")
}

// memoryUsage is what key and value take in the tree, with all fields.
func memoryUsage(c *conn, a [][]byte) error {
	if len(a) > 3 && (len(a) != 5 || !equalFold(a[3], "samples")) {
		return errSyntax
	}
	if len(a) == 5 {
		if n, ok := parseInt(a[4]); !ok {
			return errNotInteger
		} else if n < 0 {
			return errSyntax
		}
	}
	r, err := c.load(a[2])
	if err != nil {
		return err
	}
	if r.kind == kindNone {
		c.null()
		return nil
	}
	const entry = 16 // about what a leaf adds to each
	n := len(c.key) + len(c.raw) + entry
	if r.id != 0 {
		for _, family := range []byte{fieldFamily, orderFamily} {
			err := c.s.tree.Scan(c.s.ctx, within(appendID(nil, family, r.id)), func(key, value []byte, _ uint64) bool {
				n += len(key) + len(value) + entry
				return true
			})
			if err != nil {
				return err
			}
		}
	}
	c.integer(int64(n))
	return nil
}
