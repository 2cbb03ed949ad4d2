package redis

import (
	"bytes"
	"math"
	"math/big"
)

// This file has the commands on strings, and the options of SET.

// when is the expiry that a command asks for.
type when struct {
	given    bool   // the command names an expiry
	ms       int64  // since 1970
	keep     bool   // KEEPTTL
	persist  bool   // PERSIST: the expiry is removed
	argument []byte // as it stands in the command
	unit     int64  // ms in one unit of the argument
	absolute bool   // the argument counts from 1970, and not from now
}

// parse takes an option of SET and GETEX; used is how many arguments it is, 0 if it
// is none.
func (w *when) parse(a [][]byte) (used int) {
	if len(a) < 2 {
		return 0
	}
	switch lowered(a[0]) {
	case "ex":
		w.unit = 1000
	case "px":
		w.unit = 1
	case "exat":
		w.unit, w.absolute = 1000, true
	case "pxat":
		w.unit, w.absolute = 1, true
	default:
		return 0
	}
	w.given, w.argument = true, a[1]
	return 2
}

// resolve computes the time; name is the command, for its error.
func (w *when) resolve(now int64, name string) error {
	if !w.given {
		return nil
	}
	n, ok := parseInt(w.argument)
	if !ok {
		return errNotInteger
	}
	bad := fault("ERR invalid expire time in '" + name + "' command")
	if n <= 0 || n > math.MaxInt64/w.unit {
		return bad
	}
	n *= w.unit
	if !w.absolute {
		if n > math.MaxInt64-now {
			return bad
		}
		n += now
	}
	w.ms = n
	return nil
}

// get reads one record: one READ when the tree's inner nodes are cached.
func get(c *conn, a [][]byte) error {
	r, err := c.load(a[1])
	if err == nil {
		err = r.is(kindString)
	}
	if err != nil {
		return err
	}
	c.value(&r)
	return nil
}

// value answers with a string, or that there is none.
func (c *conn) value(r *record) {
	if r.kind == kindNone {
		c.misses++
		c.null()
		return
	}
	c.hits++
	c.bulk(r.value)
}

// setOptions are the options of SET.
type setOptions struct {
	when
	nx, xx bool // only if the key is absent; only if it exists
	old    bool // GET: the reply is the former value
}

// parse reads the options behind the value.
func (o *setOptions) parse(a [][]byte) error {
	for len(a) > 0 {
		n := 1
		switch opt := lowered(a[0]); {
		case opt == "nx" && !o.xx:
			o.nx = true
		case opt == "xx" && !o.nx:
			o.xx = true
		case opt == "get":
			o.old = true
		case opt == "keepttl" && !o.given:
			o.keep = true
		default:
			if o.given || o.keep {
				return errSyntax
			}
			if n = o.when.parse(a); n == 0 {
				return errSyntax
			}
		}
		a = a[n:]
	}
	return nil
}

// blind says whether the reply and the effect do not depend on the former record.
func (o *setOptions) blind() bool { return !o.nx && !o.xx && !o.old && !o.keep }

// set is SET. Without options that depend on the former record it is one blind write of the tree,
// unless a RENAME has marked the key.
func set(c *conn, a [][]byte) error {
	var w setOptions
	if err := w.parse(a[3:]); err != nil {
		return err
	}
	if err := w.resolve(c.now, "set"); err != nil {
		return err
	}
	past := w.given && w.ms <= c.now
	if w.blind() && !past {
		c.key = AppendKey(c.key[:0], c.db, a[1])
		c.enc = append(appendHead(c.enc[:0], kindString, w.ms), a[2]...)
		_, err := c.s.tree.PutIf(c.s.ctx, c.key, c.enc, unmarked)
		if err == nil {
			c.s.noteTime(c.enc)
			c.ok()
		}
		if !lost(err) {
			return err
		}
	}
	mark := len(c.out)
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		c.out = c.out[:mark]
		if w.old {
			if err := r.is(kindString); err != nil {
				return nil, err
			}
			c.value(r)
		}
		if w.nx && r.kind != kindNone || w.xx && r.kind == kindNone {
			if !w.old {
				c.null()
			}
			return nil, errLeave
		}
		if !w.old {
			c.ok()
		}
		if past {
			return nil, errRemove
		}
		if w.keep {
			w.ms = r.ttl()
		}
		return append(appendHead(b, kindString, w.ms), a[2]...), nil
	})
	return err
}

// SETNX key value. The answer is 1 if the key was absent.
// The function given to edit may run again after a lost race, so that done is set anew by each run.
func setnx(c *conn, a [][]byte) error {
	done := false
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		if done = r.kind == kindNone; !done {
			return nil, errLeave
		}
		return AppendString(b, a[2]), nil
	})
	if err == nil {
		c.flag(done)
	}
	return err
}

func setex(c *conn, a [][]byte) error  { return setFor(c, a, "setex", 1000) }
func psetex(c *conn, a [][]byte) error { return setFor(c, a, "psetex", 1) }

// SETEX and PSETEX: a[2] is the time to live in units of unit milliseconds. One conditional put
// replaces the record without a read of it; a key that is marked, because it is being renamed, takes the
// longer way through edit.
func setFor(c *conn, a [][]byte, name string, unit int64) error {
	w := when{given: true, argument: a[2], unit: unit}
	if err := w.resolve(c.now, name); err != nil {
		return err
	}
	c.key = AppendKey(c.key[:0], c.db, a[1])
	c.enc = append(appendHead(c.enc[:0], kindString, w.ms), a[3]...)
	_, err := c.s.tree.PutIf(c.s.ctx, c.key, c.enc, unmarked)
	if err == nil {
		c.s.noteTime(c.enc)
	} else if lost(err) { // being renamed
		err = c.edit(a[1], func(_ *record, b []byte) ([]byte, error) {
			return append(appendHead(b, kindString, w.ms), a[3]...), nil
		})
	}
	if err == nil {
		c.ok()
	}
	return err
}

// reading runs edit with a callback that answers with the string as it was.
func (c *conn) reading(key []byte, f func(r *record, b []byte) ([]byte, error)) error {
	mark := len(c.out)
	return c.edit(key, func(r *record, b []byte) ([]byte, error) {
		if err := r.is(kindString); err != nil {
			return nil, err
		}
		c.out = c.out[:mark]
		c.value(r)
		return f(r, b)
	})
}

func getset(c *conn, a [][]byte) error {
	return c.reading(a[1], func(_ *record, b []byte) ([]byte, error) { return AppendString(b, a[2]), nil })
}

func getdel(c *conn, a [][]byte) error {
	return c.reading(a[1], func(r *record, _ []byte) ([]byte, error) {
		if r.kind == kindNone {
			return nil, errLeave
		}
		return nil, errRemove
	})
}

// GETEX key [PERSIST | EX s | PX ms | EXAT s | PXAT ms]. Without an option it is GET and writes nothing.
// A time that is over removes the key, as Redis does.
func getex(c *conn, a [][]byte) error {
	var w when
	for i := 2; i < len(a); {
		if w.given || w.persist {
			return errSyntax
		}
		if lowered(a[i]) == "persist" {
			w.persist = true
			i++
			continue
		}
		n := w.parse(a[i:])
		if n == 0 {
			return errSyntax
		}
		i += n
	}
	if !w.given && !w.persist {
		return get(c, a)
	}
	return c.reading(a[1], func(r *record, b []byte) ([]byte, error) {
		if r.kind == kindNone {
			return nil, errLeave
		}
		if err := w.resolve(c.now, "getex"); err != nil {
			return nil, err
		}
		if w.given && w.ms <= c.now {
			return nil, errRemove
		}
		if w.persist && r.expiry == 0 {
			return nil, errLeave
		}
		return append(appendHead(b, kindString, w.ms), r.value...), nil
	})
}

// APPEND key value. The time to live stays. The new length is checked before anything is written.
func appendCmd(c *conn, a [][]byte) error {
	n := 0
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		if err := r.is(kindString); err != nil {
			return nil, err
		}
		if n = len(r.value) + len(a[2]); n > maxValueBytes {
			return nil, errTooLong
		}
		if r.kind == kindNone {
			return AppendString(b, a[2]), nil
		}
		return append(append(appendRaw(b, r.ttl()), r.value...), a[2]...), nil
	})
	if err == nil {
		c.integer(int64(n))
	}
	return err
}

// STRLEN key: the length in bytes, 0 for a key that is absent.
func strlen(c *conn, a [][]byte) error {
	r, err := c.load(a[1])
	if err == nil {
		err = r.is(kindString)
	}
	if err == nil {
		c.integer(int64(len(r.value)))
	}
	return err
}

// GETRANGE key from to. Both ends are included; a negative one counts from the end of the value. What lies
// outside the value is cut off, and an empty range is an empty string, never an error.
func getrange(c *conn, a [][]byte) error {
	from, ok1 := parseInt(a[2])
	to, ok2 := parseInt(a[3])
	if !ok1 || !ok2 {
		return errNotInteger
	}
	r, err := c.load(a[1])
	if err == nil {
		err = r.is(kindString)
	}
	if err != nil {
		return err
	}
	n := int64(len(r.value))
	if from < 0 && to < 0 && from > to {
		c.bulk(nil)
		return nil
	}
	if from < 0 {
		from = max(0, n+from)
	}
	if to < 0 {
		to = max(0, n+to)
	}
	if to = min(to, n-1); n == 0 || from > to {
		c.bulk(nil)
		return nil
	}
	c.bulk(r.value[from : to+1])
	return nil
}

// SETRANGE key offset value. A gap between the old end and the offset is filled with zeros. An empty value
// writes nothing, and makes no key. The sum of offset and length is compared without overflow.
func setrange(c *conn, a [][]byte) error {
	at, ok := parseInt(a[2])
	if !ok {
		return errNotInteger
	}
	if at < 0 {
		return fault("ERR offset is out of range")
	}
	n := 0
	err := c.edit(a[1], func(r *record, b []byte) ([]byte, error) {
		if err := r.is(kindString); err != nil {
			return nil, err
		}
		if n = len(r.value); len(a[3]) == 0 {
			return nil, errLeave
		}
		if at > maxValueBytes-int64(len(a[3])) {
			return nil, errTooLong
		}
		b = appendRaw(b, r.ttl())
		head := len(b)
		b = append(b, r.value...)
		end := int(at) + len(a[3])
		if n = max(n, end); n > len(b)-head {
			b = append(b, make([]byte, n-(len(b)-head))...)
		}
		copy(b[head+int(at):], a[3])
		return b, nil
	})
	if err == nil {
		c.integer(int64(n))
	}
	return err
}

func incr(c *conn, a [][]byte) error { return c.add(a[1], 1) }
func decr(c *conn, a [][]byte) error { return c.add(a[1], -1) }

func incrby(c *conn, a [][]byte) error {
	n, ok := parseInt(a[2])
	if !ok {
		return errNotInteger
	}
	return c.add(a[1], n)
}

// DECRBY key n. The smallest int64 is refused: its negation is no int64.
func decrby(c *conn, a [][]byte) error {
	n, ok := parseInt(a[2])
	if !ok {
		return errNotInteger
	}
	if n == math.MinInt64 {
		return fault("ERR decrement would overflow")
	}
	return c.add(a[1], -n)
}

// plus adds without overflow.
func plus(a, b int64) (int64, error) {
	if b > 0 && a > math.MaxInt64-b || b < 0 && a < math.MinInt64-b {
		return 0, errOverflow
	}
	return a + b, nil
}

// add changes a number by one write of the tree, which reads and replaces the record under one
// reservation.
func (c *conn) add(key []byte, by int64) error {
	m := c.adding(0, by)
	err := c.amend(&m.amendment, key)
	if err == nil {
		c.integer(m.sum)
	}
	return err
}

// INCRBYFLOAT key n, with the precision and range of the x87 long double that Redis computes with: longBits of
// mantissa, exponents up to 16384. The answer is written while the record is made; mark is where it begins,
// so that a run after a lost race writes it anew.
func incrbyfloat(c *conn, a [][]byte) error {
	mark := len(c.out)
	m := amendment{now: c.now}
	m.init(func(r *record, b []byte) ([]byte, error) {
		if err := r.is(kindString); err != nil {
			return nil, err
		}
		old := new(big.Float).SetPrec(longBits)
		if r.kind == kindString {
			var ok bool
			if old, ok = parseLong(r.value); !ok {
				return nil, errNotFloat
			}
		}
		by, ok := parseLong(a[2])
		if !ok {
			return nil, errNotFloat
		}
		if old.IsInf() || by.IsInf() {
			return nil, fault("ERR increment would produce NaN or Infinity")
		}
		sum := old.Add(old, by)
		if sum.MantExp(nil) > 16384 {
			return nil, fault("ERR increment would produce NaN or Infinity")
		}
		b = appendHead(b, kindString, r.ttl())
		head := len(b)
		b = appendLong(b, sum)
		c.out = c.out[:mark]
		c.bulk(b[head:])
		return b, nil
	})
	return c.amend(&m, a[1])
}

// encoding is what Redis would keep a string as.
func encoding(r *record) string {
	if r.raw || len(r.value) > 44 {
		return "raw"
	}
	if _, ok := parseInt(r.value); ok {
		return "int"
	}
	return "embstr"
}

// equalFold compares an argument with a word in lower case.
func equalFold(a []byte, word string) bool { return bytes.EqualFold(a, []byte(word)) }
