package redis

import (
	"bytes"
	"fmt"
	"math"
)

const (
	// maxLineBytes bounds inline commands and the lines with lengths, as in Redis.
	maxLineBytes = 64 << 10
	// maxArgs bounds the arguments of a command.
	maxArgs = 1 << 20
	// maxBulkBytes bounds an argument: the largest value of a tree.
	maxBulkBytes = 64 << 20
	// maxCommandBytes bounds a whole command.
	maxCommandBytes = maxBulkBytes + 16<<20
	// Limits for a connection that has not given the password, as in Redis.
	maxPreAuthArgs      = 10
	maxPreAuthBulkBytes = 16 << 10
)

// protocolError ends a connection after its text was sent.
type protocolError string

func (e protocolError) Error() string { return "Protocol error: " + string(e) }

// span is a range of bytes, counted from the start of its command.
type span struct{ from, to int }

// parser splits a client's bytes into commands. It keeps its position within an incomplete
// command, so that a command that comes in many pieces is scanned once. The parser does not copy:
// positions count from the start of the command, because the caller moves it to the start of its
// buffer.
type parser struct {
	preAuth bool // not authenticated yet: smaller limits

	at   int    // position, from the start of the command
	args []span // arguments found so far
	left int    // arguments to come; 0: at the start of a command
	bulk int    // length of the next argument in bytes; -1: the next line has it

	words [][]byte // the arguments of all commands parsed; the caller empties it
}

// next parses the first command of b. n is its length in bytes, 0 if it is not complete; argc how
// many arguments it has added to words, which alias b. The caller ignores a command without
// arguments.
//
// Preconditions: after n = 0, b begins with the same bytes again.
func (p *parser) next(b []byte) (n, argc int, err error) {
	if p.left == 0 {
		if len(b) == 0 {
			return 0, 0, nil
		}
		if b[0] != '*' {
			return p.inline(b)
		}
		line, n, err := lineOf(b, "too big mbulk count string")
		if n == 0 {
			return 0, 0, err
		}
		count, ok := parseInt(line[1:])
		if !ok || count > maxArgs {
			return 0, 0, protocolError("invalid multibulk length")
		}
		if p.preAuth && count > maxPreAuthArgs {
			return 0, 0, protocolError("unauthenticated multibulk length")
		}
		if count <= 0 {
			return n, 0, nil
		}
		p.at, p.left, p.bulk, p.args = n, int(count), -1, p.args[:0]
	}
	for p.left > 0 {
		if p.bulk < 0 {
			if ok, err := p.bulkLine(b); !ok {
				return 0, 0, err
			}
		}
		if len(b)-p.at < p.bulk+2 {
			return 0, 0, nil
		}
		p.args = append(p.args, span{p.at, p.at + p.bulk})
		p.at += p.bulk + 2
		p.bulk = -1
		p.left--
	}
	for _, s := range p.args {
		p.words = append(p.words, b[s.from:s.to:s.to])
	}
	return p.at, len(p.args), nil
}

// bulkLine parses the line with the length of the next argument. False without an error: the line is
// not complete.
func (p *parser) bulkLine(b []byte) (ok bool, err error) {
	line, n, err := lineOf(b[p.at:], "too big bulk count string")
	if n == 0 {
		return false, err
	}
	if len(line) == 0 || line[0] != '$' {
		c := byte('\r')
		if len(line) > 0 {
			c = line[0]
		}
		return false, protocolError(fmt.Sprintf("expected '$', got '%c'", c))
	}
	size, ok := parseInt(line[1:])
	switch {
	case !ok || size < 0 || size > maxBulkBytes:
		return false, protocolError("invalid bulk length")
	case p.preAuth && size > maxPreAuthBulkBytes:
		return false, protocolError("unauthenticated bulk length")
	case p.at+n+int(size) > maxCommandBytes:
		return false, protocolError("too big command")
	}
	p.at, p.bulk = p.at+n, int(size)
	return true, nil
}

// needs is a lower bound of the length of the incomplete command, in bytes; 0: not known.
func (p *parser) needs() int {
	if p.left > 0 && p.bulk >= 0 {
		return p.at + p.bulk + 2
	}
	return 0
}

// lineOf is the line that b starts with. n is its length with CR LF; 0: it is not complete, or longer
// than maxLineBytes, which is the error tooLong.
func lineOf(b []byte, tooLong protocolError) (line []byte, n int, err error) {
	i := bytes.IndexByte(b[:min(len(b), maxLineBytes)], '\r')
	if i < 0 {
		if len(b) >= maxLineBytes {
			return nil, 0, tooLong
		}
		return nil, 0, nil
	}
	if len(b) < i+2 {
		return nil, 0, nil
	}
	return b[:i], i + 2, nil
}

// inline parses a command without RESP: words in a line, as typed with telnet. See next.
func (p *parser) inline(b []byte) (n, argc int, err error) {
	i := bytes.IndexByte(b[:min(len(b), maxLineBytes)], '\n')
	if i < 0 {
		if len(b) >= maxLineBytes {
			return 0, 0, protocolError("too big inline request")
		}
		return 0, 0, nil
	}
	line := b[:i]
	if i > 0 && line[i-1] == '\r' {
		line = line[:i-1]
	}
	if z := bytes.IndexByte(line, 0); z >= 0 {
		line = line[:z] // as Redis does
	}
	for {
		for len(line) > 0 && space(line[0]) {
			line = line[1:]
		}
		if len(line) == 0 {
			return i + 1, argc, nil
		}
		word, rest, ok := wordOf(line)
		if !ok {
			return 0, 0, protocolError("unbalanced quotes in request")
		}
		p.words, line = append(p.words, word), rest
		argc++
	}
}

// wordOf is the first word of a line. A quotation may begin in its middle, and ends it. False: a
// quotation is not closed, or not followed by a space.
func wordOf(line []byte) (word, rest []byte, ok bool) {
	word = []byte{}
	for i, c := range line {
		switch {
		case space(c):
			return word, line[i:], true
		case c == '"' || c == '\'':
			word, rest, ok = quoted(word, line[i+1:], c)
			return word, rest, ok && (len(rest) == 0 || space(rest[0]))
		}
		word = append(word, c)
	}
	return word, nil, true
}

// quoted appends the quotation that line begins with, up to the closing quote. Double quotes
// have the escapes of C; single quotes only an escaped single quote. False: no closing quote.
func quoted(word, line []byte, quote byte) (_, rest []byte, ok bool) {
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case c == quote:
			return word, line[i+1:], true
		case c != '\\' || i+1 == len(line):
		case quote == '"' && i+3 < len(line) && line[i+1] == 'x' && hex(line[i+2]) >= 0 && hex(line[i+3]) >= 0:
			c = byte(hex(line[i+2])<<4 | hex(line[i+3]))
			i += 3
		case quote == '"':
			i++
			c = unescape(line[i])
		case line[i+1] == quote:
			i++
			c = quote
		}
		word = append(word, c)
	}
	return nil, nil, false
}

// space says whether c separates words of an inline command.
func space(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

// hex is the value of a hexadecimal digit; below 0: it is none.
func hex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// unescape is what a backslash and c stand for.
func unescape(c byte) byte {
	switch c {
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	case 'b':
		return '\b'
	case 'a':
		return '\a'
	}
	return c
}

// parseInt reads an integer as Redis does: digits as it would print them itself,
// nothing around them.
func parseInt(b []byte) (int64, bool) {
	if len(b) == 1 && b[0] == '0' {
		return 0, true
	}
	negative := len(b) > 0 && b[0] == '-'
	if negative {
		b = b[1:]
	}
	if len(b) == 0 || len(b) > 19 || b[0] < '1' || b[0] > '9' {
		return 0, false
	}
	var v uint64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		v = v*10 + uint64(c-'0') // 19 digits stay below 2^64
	}
	switch {
	case negative && v <= math.MaxInt64+1:
		return -int64(v), true
	case !negative && v <= math.MaxInt64:
		return int64(v), true
	}
	return 0, false
}
