package redis

import (
	"math"
	"strconv"
	"strings"
)

// This file appends replies to the connection's output, in RESP2 or RESP3 as the client has
// chosen.

// fault is the text of an error reply; its first word is the error's code.
type fault string

func (f fault) Error() string { return string(f) }

const (
	errWrongType  = fault("WRONGTYPE Operation against a key holding the wrong kind of value")
	errSyntax     = fault("ERR syntax error")
	errNotInteger = fault("ERR value is not an integer or out of range")
	errIntRange   = fault("ERR value is out of range, value must between -2147483648 and 2147483647")
	errNotFloat   = fault("ERR value is not a valid float")
	errOverflow   = fault("ERR increment or decrement would overflow")
	errNoSuchKey  = fault("ERR no such key")
	errTooLong    = fault("ERR string exceeds maximum allowed size (proto-max-bulk-len)")
	errDBRange    = fault("ERR DB index is out of range")
	errCursor     = fault("ERR invalid cursor")
	errReply      = fault("ERR the answer exceeds 256 MiB; ask for less at once, with SCAN, HSCAN or a range")
	errHeld       = fault("TRYAGAIN clients have not read more than 1 GiB of answers yet; ask again later")
	errContended  = fault("TRYAGAIN others kept changing the key")
)

// status replies with a simple string.
func (c *conn) status(s string) {
	c.out = append(append(append(c.out, '+'), s...), '\r', '\n')
}

// ok replies OK.
func (c *conn) ok() { c.out = append(c.out, "+OK\r\n"...) }

// integer replies with a number.
func (c *conn) integer(n int64) {
	c.out = append(strconv.AppendInt(append(c.out, ':'), n, 10), '\r', '\n')
}

// flag replies 1 or 0.
func (c *conn) flag(b bool) {
	if b {
		c.out = append(c.out, ":1\r\n"...)
	} else {
		c.out = append(c.out, ":0\r\n"...)
	}
}

// bulk replies with a string of bytes.
func (c *conn) bulk(b []byte) {
	c.out = append(strconv.AppendInt(append(c.out, '$'), int64(len(b)), 10), '\r', '\n')
	c.out = append(append(c.out, b...), '\r', '\n')
}

// text is bulk of a Go string.
func (c *conn) text(s string) {
	c.out = append(strconv.AppendInt(append(c.out, '$'), int64(len(s)), 10), '\r', '\n')
	c.out = append(append(c.out, s...), '\r', '\n')
}

// verbatim is text for people.
func (c *conn) verbatim(s string) {
	if c.proto < 3 {
		c.text(s)
		return
	}
	c.out = append(strconv.AppendInt(append(c.out, '='), int64(len(s)+4), 10), "\r\ntxt:"...)
	c.out = append(append(c.out, s...), '\r', '\n')
}

// null replies that there is nothing.
func (c *conn) null() {
	if c.proto >= 3 {
		c.out = append(c.out, "_\r\n"...)
	} else {
		c.out = append(c.out, "$-1\r\n"...)
	}
}

// head begins a reply of n elements.
func (c *conn) head(kind byte, n int) {
	c.out = append(strconv.AppendInt(append(c.out, kind), int64(n), 10), '\r', '\n')
}

// array begins an array; its n elements follow.
func (c *conn) array(n int) { c.head('*', n) }

// mapping announces n pairs.
func (c *conn) mapping(n int) {
	if c.proto >= 3 {
		c.head('%', n)
	} else {
		c.head('*', 2*n)
	}
}

// set begins a set, which is an array in RESP2.
func (c *conn) set(n int) {
	if c.proto >= 3 {
		c.head('~', n)
	} else {
		c.head('*', n)
	}
}

// double replies with a score: a double in RESP3, a string in RESP2.
func (c *conn) double(f float64) {
	if c.proto >= 3 {
		c.out = append(appendFloat(append(c.out, ','), f), '\r', '\n')
		return
	}
	c.bulk(appendFloat(c.small[:0], f))
}

// appendFloat prints a score as C does with %.17g.
func appendFloat(b []byte, f float64) []byte {
	switch {
	case math.IsInf(f, 1):
		return append(b, "inf"...)
	case math.IsInf(f, -1):
		return append(b, "-inf"...)
	case math.IsNaN(f):
		return append(b, "nan"...)
	case f == math.Trunc(f) && math.Abs(f) < 1e15:
		if f == 0 && math.Signbit(f) {
			return append(b, "-0"...)
		}
		return strconv.AppendInt(b, int64(f), 10)
	}
	return strconv.AppendFloat(b, f, 'g', 17, 64)
}

// precede puts an array's or mapping's head before what was appended since a mark,
// for those whose length is known only afterwards.
func (c *conn) precede(mark int, announce func(n int), n int) {
	end := len(c.out)
	announce(n)
	head := c.small[:copy(c.small[:cap(c.small)], c.out[end:])]
	copy(c.out[mark+len(head):], c.out[mark:end])
	copy(c.out[mark:], head)
}

// fail appends an error.
func (c *conn) fail(text string) {
	c.out = append(c.out, '-')
	text = strings.Trim(text, "\r\n")
	for i := range len(text) {
		b := text[i]
		if b == '\r' || b == '\n' {
			b = ' ' // an error is one line
		}
		c.out = append(c.out, b)
	}
	c.out = append(c.out, '\r', '\n')
}

// tooMuch refuses a reply of more than maxReplyBytes.
func (c *conn) tooMuch(mark int) bool { return len(c.out)-mark > maxReplyBytes }
