package kvfile

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Format of a file.
type Format string

const (
	CSV   Format = "csv"
	JSONL Format = "jsonl"
)

// Encoding of keys and values in text.
type Encoding string

const (
	Text   Encoding = ""
	Hex    Encoding = "hex"
	Base64 Encoding = "base64"
)

// Decode is the bytes that s stands for.
func (e Encoding) Decode(s string) ([]byte, error) {
	switch e {
	case Hex:
		return hex.DecodeString(s)
	case Base64:
		return base64.StdEncoding.DecodeString(s)
	}
	return []byte(s), nil
}

// Encode is the text for b. As text, b itself.
func (e Encoding) Encode(b []byte) string {
	switch e {
	case Hex:
		return hex.EncodeToString(b)
	case Base64:
		return base64.StdEncoding.EncodeToString(b)
	}
	return string(b)
}

// column is the name of a column or field with values of an encoding.
func column(what string, e Encoding) string {
	if e == Text {
		return what
	}
	return what + "_" + string(e)
}

// encodingOf is the encoding of a column or field of that name.
func encodingOf(what, name string) (Encoding, bool) {
	for _, e := range []Encoding{Text, Hex, Base64} {
		if name == column(what, e) {
			return e, true
		}
	}
	return Text, false
}

// FormatOf a file by its name: "" if that does not tell.
func FormatOf(name string) Format {
	name = strings.ToLower(name)
	switch {
	case strings.HasSuffix(name, ".csv"):
		return CSV
	case strings.HasSuffix(name, ".jsonl"), strings.HasSuffix(name, ".ndjson"), strings.HasSuffix(name, ".json"):
		return JSONL
	}
	return ""
}

// LineError is what is wrong with a file, and where.
type LineError struct {
	Line int
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %v", e.Line, e.Err) }
func (e *LineError) Unwrap() error { return e.Err }

var (
	// ErrCutOff: the file ends in the middle of a line.
	ErrCutOff = errors.New("cut off: the file ends without a newline (add one if the line is whole)")
	// ErrNotText: bytes that a text column cannot hold.
	ErrNotText = errors.New("not text: use hex or base64")
)

// isText says whether a text column gives b back as it was: CSV readers change line ends.
func isText(b []byte) bool {
	for _, c := range b {
		if c == '\r' || c == 0 {
			return false
		}
	}
	return utf8.Valid(b)
}
