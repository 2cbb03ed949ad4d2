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

// span is a part of the buffer, counted from the start of its command.
type span struct{ from, to int }

// parser cuts commands out of what a client sends. It goes on where it stopped: a
// command that comes in many pieces is looked at once.
type parser struct {
	preAuth bool // has not said the password

	at   int // how far we are, from the start of the command
	args []span
	left int // arguments to come; 0: at the start of a command
	bulk int // length of the argument that comes, -1: its length comes

	words [][]byte // the arguments of all commands parsed; the caller empties it
}

// next parses the first command of b. It returns how many bytes that took, 0 if the
// command has not come whole, and how many arguments it added to words, which are
// good as long as b is. A command without arguments is to be ignored.
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
			line, n, err := lineOf(b[p.at:], "too big bulk count string")
			if n == 0 {
				return 0, 0, err
			}
			if len(line) == 0 || line[0] != '$' {
				c := byte('\r')
				if len(line) > 0 {
					c = line[0]
				}
				return 0, 0, protocolError(fmt.Sprintf("expected '$', got '%c'", c))
			}
			size, ok := parseInt(line[1:])
			if !ok || size < 0 || size > maxBulkBytes {
				return 0, 0, protocolError("invalid bulk length")
			}
			if p.preAuth && size > maxPreAuthBulkBytes {
				return 0, 0, protocolError("unauthenticated bulk length")
			}
			if p.at+n+int(size) > maxCommandBytes {
				return 0, 0, protocolError("too big command")
			}
			p.at, p.bulk = p.at+n, int(size)
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

// needs is how many bytes the command in hand has at least.
func (p *parser) needs() int {
	if p.left > 0 && p.bulk >= 0 {
		return p.at + p.bulk + 2
	}
	return 0
}

// lineOf is the line that b starts with, and its length with the end, 0 if it has
// not come whole.
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

// inline is a command in a line of words, as a person types it.
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
		line = line[:z] // as Redis reads it
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

// wordOf is the first word of a line, which may be quoted.
func wordOf(line []byte) (word, rest []byte, ok bool) {
	word = []byte{}
	for i := 0; i < len(line); {
		switch c := line[i]; {
		case space(c):
			return word, line[i:], true
		case c == '"':
			for i++; ; i++ {
				if i >= len(line) {
					return nil, nil, false
				}
				if line[i] == '"' {
					break
				}
				if line[i] != '\\' || i+1 >= len(line) {
					word = append(word, line[i])
					continue
				}
				if i+3 < len(line) && line[i+1] == 'x' && hex(line[i+2]) >= 0 && hex(line[i+3]) >= 0 {
					word = append(word, byte(hex(line[i+2])<<4|hex(line[i+3])))
					i += 3
					continue
				}
				i++
				word = append(word, unescape(line[i]))
			}
			if i++; i < len(line) && !space(line[i]) {
				return nil, nil, false
			}
			return word, line[i:], true
		case c == '\'':
			for i++; ; i++ {
				if i >= len(line) {
					return nil, nil, false
				}
				if line[i] == '\'' {
					break
				}
				if line[i] == '\\' && i+1 < len(line) && line[i+1] == '\'' {
					i++
				}
				word = append(word, line[i])
			}
			if i++; i < len(line) && !space(line[i]) {
				return nil, nil, false
			}
			return word, line[i:], true
		default:
			word = append(word, c)
			i++
		}
	}
	return word, nil, true
}

func space(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

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
