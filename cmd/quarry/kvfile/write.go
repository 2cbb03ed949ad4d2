package kvfile

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf8"
)

// Writer writes entries.
type Writer struct {
	format   Format
	encoding Encoding
	out      *bufio.Writer
	csv      *csv.Writer
	begun    bool
}

// NewWriter writes a file of a format. As JSON lines, text that is no UTF-8 is
// written as base64; as CSV it is refused.
func NewWriter(w io.Writer, f Format, e Encoding) *Writer {
	out := bufio.NewWriterSize(w, 64<<10)
	return &Writer{format: f, encoding: e, out: out, csv: csv.NewWriter(out)}
}

// Put writes an entry.
func (w *Writer) Put(key, value []byte) error {
	if w.format == CSV {
		return w.putCSV(key, value)
	}
	var e record
	w.field(key, &e.Key, &e.KeyHex, &e.KeyBase64)
	w.field(value, &e.Value, &e.ValueHex, &e.ValueBase64)
	j := json.NewEncoder(w.out)
	j.SetEscapeHTML(false)
	return j.Encode(&e)
}

func (w *Writer) field(b []byte, text, hex, b64 **string) {
	e := w.encoding
	if e == Text && !utf8.Valid(b) {
		e = Base64
	}
	s := e.Encode(b)
	*map[Encoding]**string{Text: text, Hex: hex, Base64: b64}[e] = &s
}

func (w *Writer) header() error {
	if w.begun {
		return nil
	}
	w.begun = true
	return w.csv.Write([]string{column("key", w.encoding), column("value", w.encoding)})
}

func (w *Writer) putCSV(key, value []byte) error {
	if err := w.header(); err != nil {
		return err
	}
	if w.encoding == Text {
		for _, b := range [][]byte{key, value} {
			if !isText(b) {
				return fmt.Errorf("key %.60q: %w", key, ErrNotText)
			}
		}
	}
	return w.csv.Write([]string{w.encoding.Encode(key), w.encoding.Encode(value)})
}

// Flush writes out what is buffered.
func (w *Writer) Flush() error {
	if w.format == CSV {
		if err := w.header(); err != nil {
			return err
		}
		w.csv.Flush()
		if err := w.csv.Error(); err != nil {
			return err
		}
	}
	return w.out.Flush()
}
