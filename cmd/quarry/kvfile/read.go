package kvfile

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// MaxLineBytes bounds a line: a value of 64 MiB in hex, and its key.
const MaxLineBytes = 2*(64<<20) + 1<<16

// Reader reads entries.
type Reader struct {
	format Format
	lines  *bufio.Reader
	csv    *csv.Reader
	seen   *tail
	key    Encoding
	value  Encoding
	swap   bool // the value's column comes first
	begun  bool
	ahead  []string
	at     int // line of ahead
	line   int
	buf    []byte
	err    error
}

// NewReader reads a file of a format.
func NewReader(r io.Reader, f Format) *Reader {
	if f == CSV {
		t := &tail{r: r}
		c := csv.NewReader(&limited{r: t, n: MaxLineBytes})
		c.FieldsPerRecord = 2
		return &Reader{format: f, csv: c, seen: t}
	}
	return &Reader{format: f, lines: bufio.NewReaderSize(r, 64<<10)}
}

// Line is the number of the line of the last entry, from 1.
func (r *Reader) Line() int { return r.line }

// Next is the next entry, valid until the next call; io.EOF at the end. Any other
// error is a *LineError, or one of the underlying reader, and the last.
func (r *Reader) Next() (key, value []byte, err error) {
	if r.err != nil {
		return nil, nil, r.err
	}
	if r.format == CSV {
		key, value, err = r.nextCSV()
	} else {
		key, value, err = r.nextJSON()
	}
	r.err = err
	return key, value, err
}

func (r *Reader) wrong(format string, args ...any) error {
	return &LineError{r.line, fmt.Errorf(format, args...)}
}

// tail remembers the last byte read.
type tail struct {
	r    io.Reader
	last byte
}

func (t *tail) Read(b []byte) (int, error) {
	n, err := t.r.Read(b)
	if n > 0 {
		t.last = b[n-1]
	}
	return n, err
}

// limited ends with an error in a line that is longer than n bytes.
type limited struct {
	r io.Reader
	n int
	k int
}

var errLong = fmt.Errorf("longer than %d bytes", MaxLineBytes)

func (l *limited) Read(b []byte) (int, error) {
	n, err := l.r.Read(b)
	if i := bytes.LastIndexByte(b[:n], '\n'); i >= 0 {
		l.k = n - i - 1
	} else if l.k += n; l.k > l.n {
		return 0, errLong
	}
	return n, err
}

// The row that was read ahead, or io.EOF behind the last. A file whose last line has no end is cut off:
// its last row may be half a row.
func (r *Reader) nextCSV() (key, value []byte, err error) {
	if !r.begun {
		r.begun = true
		if err := r.header(); err != nil {
			return nil, nil, err
		}
		if r.ahead, err = r.record(); err == io.EOF && r.seen.last != '\n' {
			return nil, nil, &LineError{1, ErrCutOff}
		} else if err != nil {
			return nil, nil, err
		}
	}
	row, line := r.ahead, r.at
	if row == nil {
		return nil, nil, io.EOF
	}
	// One ahead: only at the end of the file it is seen whether the last line was whole.
	next, err := r.record()
	if err != nil && err != io.EOF {
		r.line = line
		var le *LineError
		if errors.As(err, &le) {
			r.line = le.Line
		}
		return nil, nil, err
	}
	r.ahead, r.line = next, line
	if err == io.EOF && r.seen.last != '\n' {
		return nil, nil, r.wrong("%w", ErrCutOff)
	}
	if r.swap {
		row[0], row[1] = row[1], row[0]
	}
	if key, err = r.key.Decode(row[0]); err != nil {
		return nil, nil, r.wrong("key: %w", err)
	}
	if value, err = r.value.Decode(row[1]); err != nil {
		return nil, nil, r.wrong("value: %w", err)
	}
	return key, value, nil
}

// record reads a record; nil and io.EOF at the end.
func (r *Reader) record() ([]string, error) {
	row, err := r.csv.Read()
	var pe *csv.ParseError
	switch {
	case err == io.EOF:
		return nil, io.EOF
	case errors.As(err, &pe):
		return nil, &LineError{pe.StartLine, pe.Err}
	case err != nil:
		line, _ := r.csv.FieldPos(0)
		return nil, &LineError{max(line, r.line), err}
	}
	r.at, _ = r.csv.FieldPos(0)
	return row, nil
}

// The header names the two columns, in either order, and their encodings: key or value is text,
// key_hex and key_base64 are encoded.
func (r *Reader) header() error {
	row, err := r.record()
	if err == io.EOF {
		return &LineError{1, errors.New("empty: want a header such as key,value")}
	} else if err != nil {
		return err
	}
	for _, swap := range []bool{false, true} {
		k, v := row[0], row[1]
		if swap {
			k, v = v, k
		}
		ke, ok1 := encodingOf("key", k)
		ve, ok2 := encodingOf("value", v)
		if ok1 && ok2 {
			r.key, r.value, r.swap = ke, ve, swap
			return nil
		}
	}
	return &LineError{1, fmt.Errorf("header %q: want key,value, or key_hex, key_base64, value_hex, value_base64", row)}
}

// record is a line of JSON.
type record struct {
	Key         *string `json:"key,omitempty"`
	KeyHex      *string `json:"key_hex,omitempty"`
	KeyBase64   *string `json:"key_base64,omitempty"`
	Value       *string `json:"value,omitempty"`
	ValueHex    *string `json:"value_hex,omitempty"`
	ValueBase64 *string `json:"value_base64,omitempty"`
}

// One JSON object a line. Unknown fields are errors, because a misspelt name would lose data silently.
func (r *Reader) nextJSON() (key, value []byte, err error) {
	for {
		line, err := r.readLine()
		if err != nil {
			return nil, nil, err
		}
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		if !utf8.Valid(line) {
			return nil, nil, r.wrong("not UTF-8: want key_base64 or value_base64 for binary")
		}
		var e record
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&e); err != nil {
			return nil, nil, r.wrong("%w", err)
		}
		if rest := line[d.InputOffset():]; len(bytes.TrimSpace(rest)) > 0 {
			return nil, nil, r.wrong("more than one object: %.20q", rest)
		}
		if key, err = one("key", e.Key, e.KeyHex, e.KeyBase64); err == nil {
			value, err = one("value", e.Value, e.ValueHex, e.ValueBase64)
		}
		if err != nil {
			return nil, nil, r.wrong("%w", err)
		}
		return key, value, nil
	}
}

// The one field of three that is given, decoded. None and several are errors: an empty key is written "", not left out.
func one(what string, text, hex, b64 *string) ([]byte, error) {
	var out []byte
	n := 0
	for _, f := range []struct {
		s *string
		e Encoding
	}{{text, Text}, {hex, Hex}, {b64, Base64}} {
		if f.s == nil {
			continue
		}
		n++
		b, err := f.e.Decode(*f.s)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", column(what, f.e), err)
		}
		out = b
	}
	if n != 1 {
		return nil, fmt.Errorf("want one of %s, %[1]s_hex, %[1]s_base64, not %d of them", what, n)
	}
	return out, nil
}

// readLine reads a line with its newline.
func (r *Reader) readLine() ([]byte, error) {
	r.buf = r.buf[:0]
	r.line++
	for {
		part, err := r.lines.ReadSlice('\n')
		r.buf = append(r.buf, part...)
		switch {
		case len(r.buf) > MaxLineBytes:
			return nil, r.wrong("%w", errLong)
		case err == nil:
			return r.buf, nil
		case err == bufio.ErrBufferFull:
		case err == io.EOF && len(r.buf) == 0:
			r.line--
			return nil, io.EOF
		case err == io.EOF:
			return nil, r.wrong("%w", ErrCutOff)
		default:
			return nil, err
		}
	}
}
