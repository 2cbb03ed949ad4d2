package redismodel

import (
	"fmt"
	"strconv"
)

const (
	wrongType = "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
	noSuchKey = "-ERR no such key\r\n"
)

// atom is one instant of a command.
type atom struct {
	e     *Event
	op    int8
	step  int8
	last  bool
	left  bool // of a command that was not done: it may have left an empty hash
	again bool // of a write that may be seen in a hash that is removed, two atoms before
}

func (a *atom) says(reply string) bool { return a.e.Unknown || a.e.Reply == reply }

// checker compares one history with the model.
type checker struct {
	texts
	states   int // made so far
	limit    int
	tooLarge bool
}

// step gives the states that may follow; none if the atom does not explain the answer.
func (c *checker) step(s state, a *atom) (out []any) {
	r := &s.regs[a.op]
	if r.step != a.step {
		return nil
	}
	if c.states >= c.limit {
		c.tooLarge = true
		return nil
	}
	r.step++
	next := func(s state) {
		if a.last {
			s.regs[a.op] = register{}
		}
		c.states++
		out = append(out, s)
	}
	if a.left {
		next(s)
		if key := keyIndex(a.e.Args[1]); s.keys[key].kind == kindNone {
			c.create(&s, key, a)
			next(s)
		}
		return out
	}
	switch a.e.Args[0] {
	case "SET", "MSET", "GET", "GETSET", "GETDEL", "SETNX", "APPEND", "INCR":
		c.onString(s, a, next)
	case "EXPIRE", "DEL", "TYPE":
		c.onKey(s, a, next)
	case "RENAME", "RENAMENX":
		c.onRename(s, a, next)
	case "COPY":
		c.onCopy(s, a, next)
	default:
		c.onField(s, a, next)
	}
	return out
}

func bulk(v string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(v), v) }
func num(n int) string     { return fmt.Sprintf(":%d\r\n", n) }

// value is the answer with a text.
func (c *checker) value(v text, there bool) string {
	if !there {
		return "$-1\r\n"
	}
	return bulk(c.all[v])
}

func (c *checker) number(v text) int {
	n, _ := strconv.Atoi(c.all[v])
	return n
}

func (c *checker) onString(s state, a *atom, next func(state)) {
	args := a.e.Args
	key := keyIndex(args[1])
	was := s.keys[key]
	str := was.kind == kindString
	answer := c.value(was.v[0], str)
	put := func(v string) { s.put(key, held{kind: kindString, v: [2]text{c.of(v)}}) }
	ok := false
	switch args[0] {
	case "SET", "MSET": // of one key
		ok = a.says("+OK\r\n")
		put(args[2])
	case "GET":
		ok = a.says(answer) && (str || was.empty()) || was.kind > kindString && a.says(wrongType)
	case "GETSET":
		ok = a.says(answer)
		put(args[2])
	case "GETDEL":
		ok = a.says(answer)
		s.put(key, held{})
	case "SETNX":
		if was.kind != kindNone {
			ok = a.says(num(0))
			break
		}
		ok = a.says(num(1))
		put(args[2])
	case "APPEND":
		v := args[2]
		if str {
			v = c.all[was.v[0]] + v
		}
		ok = a.says(num(len(v)))
		put(v)
	case "INCR":
		n := 1
		if str {
			n += c.number(was.v[0])
		}
		ok = a.says(num(n))
		put(strconv.Itoa(n))
	}
	if ok {
		next(s)
	}
}

func (c *checker) onKey(s state, a *atom, next func(state)) {
	key := keyIndex(a.e.Args[1])
	was := s.keys[key]
	if a.e.Args[0] == "TYPE" {
		if a.says("+"+kindNames[was.kind]+"\r\n") || was.empty() && a.says("+none\r\n") {
			next(s)
		}
		return
	}
	if a.e.Args[0] == "DEL" {
		s.put(key, held{})
	}
	if was.kind != kindNone && a.says(num(1)) || was.empty() && a.says(num(0)) {
		next(s)
	}
}

func (c *checker) onRename(s state, a *atom, next func(state)) {
	from, to := keyIndex(a.e.Args[1]), keyIndex(a.e.Args[2])
	was, fresh := s.keys[from], a.e.Args[0] == "RENAMENX"
	yes := "+OK\r\n"
	if fresh {
		yes = num(1)
	}
	if was.empty() && a.says(noSuchKey) {
		next(s)
	}
	switch {
	case was.kind == kindNone:
	case from == to:
		if fresh && a.says(num(0)) || !fresh && a.says(yes) {
			next(s)
		}
	default:
		if fresh && s.keys[to].kind != kindNone && a.says(num(0)) {
			next(s)
		}
		if (!fresh || s.keys[to].empty()) && a.says(yes) {
			s.rename(from, to)
			next(s)
		}
	}
}

func (c *checker) onCopy(s state, a *atom, next func(state)) {
	from, to := keyIndex(a.e.Args[1]), keyIndex(a.e.Args[2])
	r := &s.regs[a.op]
	switch {
	case from == to: // an error
		next(s)
	case a.step == 0:
		if r.kind = s.keys[from].kind; r.kind == kindString {
			r.f = s.keys[from].v[0]
		} else if r.kind != kindNone {
			r.at = int8(from) + 1
		}
		next(s)
	case a.step < 3:
		if r.kind > kindString {
			if r.at == atEnded {
				return
			}
			if v := s.keys[r.at-1].v; a.step == 1 {
				r.f = v[0]
			} else {
				r.g, r.at = v[1], atNone
			}
		}
		next(s)
	default:
		copied := held{kind: r.kind, v: [2]text{r.f, r.g}}
		replace := len(a.e.Args) > 3
		if (copied.empty() || !replace && s.keys[to].kind != kindNone) && a.says(num(0)) {
			next(s)
		}
		if !copied.empty() && (replace || s.keys[to].empty()) && a.says(num(1)) {
			s.put(to, copied)
			next(s)
		}
	}
}

// onField is a command on a field or member: it looks the key up, then reads or changes the
// field in the hash that the key had.
func (c *checker) onField(s state, a *atom, next func(state)) {
	r, key := &s.regs[a.op], keyIndex(a.e.Args[1])
	step := a.step
	if a.again {
		step -= 2
	}
	switch step {
	case -2: // the exception, or not
		next(s)
		if s.keys[key].kind == kindString {
			return
		}
		c.create(&s, key, a)
		r.at, r.seen = int8(key)+1, true
		next(s)
	case -1:
		next(s) // not seen, or seen empty
		if r.seen && r.at > atNone {
			c.field(s, a, func(string) bool { return true }, next)
		}
	case 0:
		if r.seen && r.at > atNone {
			if !s.keys[r.at-1].empty() {
				return // not removed
			}
			s.put(int(r.at)-1, held{}) // an empty hash is removed without a command
		}
		r.seen, r.at = false, atNone
		c.look(s, a, next)
	default:
		switch r.at {
		case atEnded:
		case atRefused:
			next(s)
		default:
			c.field(s, a, a.says, next)
		}
	}
}

// create makes an empty hash or sorted set where there is none.
func (c *checker) create(s *state, key int, a *atom) {
	if s.keys[key].kind == kindNone {
		s.keys[key].kind = kindOf(a.e.Args[0])
	}
}

// look looks the key up.
func (c *checker) look(s state, a *atom, next func(state)) {
	r, key := &s.regs[a.op], keyIndex(a.e.Args[1])
	switch s.keys[key].kind {
	case kindString:
		if r.at = atRefused; a.says(wrongType) {
			next(s)
		}
		return
	case kindNone:
		if name := a.e.Args[0]; name == "HGET" || name == "ZSCORE" || name == "HDEL" || name == "ZREM" || a.e.Args[2] == "XX" {
			next(s)
			return
		}
		c.create(&s, key, a)
	}
	r.at = int8(key) + 1
	next(s)
}

// field is the second atom of a command on a field or member.
func (c *checker) field(s state, a *atom, says func(string) bool, next func(state)) {
	name, args := a.e.Args[0], a.e.Args[2:]
	option := ""
	if name == "ZADD" && len(args) == 3 {
		option, args = args[0], args[1:]
	}
	which := args[0]
	if name == "ZADD" {
		which = args[1]
	}
	f := new(text)
	if at := s.regs[a.op].at; at > atNone {
		f = &s.keys[at-1].v[fieldIndex(which)]
	}
	there, old := *f != absent, c.number(*f)
	fresh := num(1)
	if there {
		fresh = num(0)
	}
	ok := false
	switch name {
	case "HGET", "ZSCORE":
		ok = says(c.value(*f, there))
	case "HDEL", "ZREM":
		ok = there && says(num(1)) || !there && says(num(0))
		*f = absent
	case "HSET":
		ok = says(fresh)
		*f = c.of(args[1])
	case "HSETNX":
		if ok = says(fresh); !there {
			*f = c.of(args[1])
		}
	case "HINCRBY":
		ok = says(num(old + 1))
		*f = c.of(strconv.Itoa(old + 1))
	case "ZADD":
		ok = c.zadd(f, there, option, args[0], says)
	}
	if ok {
		next(s)
	}
}

// zadd changes a member's score, and says whether that explains the answer.
func (c *checker) zadd(f *text, there bool, option, score string, says func(string) bool) bool {
	old := c.number(*f)
	to, _ := strconv.Atoi(score)
	switch {
	case option == "INCR":
		*f = c.of(strconv.Itoa(old + 1))
		return says(bulk(c.all[*f]))
	case !there && option == "XX":
		return says(num(0))
	case there && (option == "NX" || option == "GT" && to <= old || option == "LT" && to >= old):
		return says(num(0))
	}
	*f = c.of(score)
	if there {
		return says(num(0))
	}
	return says(num(1))
}
