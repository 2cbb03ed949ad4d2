package kvfile

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type pair struct{ key, value []byte }

func readAll(f Format, b string) (out []pair, r *Reader, err error) {
	r = NewReader(strings.NewReader(b), f)
	for {
		k, v, err := r.Next()
		if err == io.EOF {
			return out, r, nil
		} else if err != nil {
			return out, r, err
		}
		out = append(out, pair{bytes.Clone(k), bytes.Clone(v)})
	}
}

// TestWhatIsWrittenIsRead: any bytes, in every format and encoding that takes them.
func TestWhatIsWrittenIsRead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom([]Format{CSV, JSONL}).Draw(t, "format")
		e := rapid.SampledFrom([]Encoding{Text, Hex, Base64}).Draw(t, "encoding")
		n := rapid.IntRange(0, 20).Draw(t, "n")
		var want []pair
		var file bytes.Buffer
		w := NewWriter(&file, f, e)
		for range n {
			p := pair{rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "key"), rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "value")}
			if rapid.Bool().Draw(t, "text") {
				p = pair{[]byte(rapid.StringN(1, 9, 40).Draw(t, "k")), []byte(rapid.String().Draw(t, "v"))}
			}
			err := w.Put(p.key, p.value)
			if f == CSV && e == Text && !(isText(p.key) && isText(p.value)) {
				require.ErrorIs(t, err, ErrNotText)
				continue
			}
			require.NoError(t, err)
			want = append(want, p)
		}
		require.NoError(t, w.Flush())
		got, _, err := readAll(f, file.String())
		require.NoError(t, err, file.String())
		require.Len(t, got, len(want))
		for i := range want {
			require.True(t, bytes.Equal(want[i].key, got[i].key), "%q", file.String())
			require.True(t, bytes.Equal(want[i].value, got[i].value), "%q", file.String())
		}
		// Cut anywhere but between two lines: refused, never taken for the whole.
		if file.Len() > 1 {
			cut := file.String()[:rapid.IntRange(1, file.Len()-1).Draw(t, "cut")]
			if !strings.HasSuffix(cut, "\n") {
				got, _, err := readAll(f, cut)
				var le *LineError
				require.ErrorAs(t, err, &le, "%q gave %v", cut, got)
			}
		}
	})
}

func TestErrorsNameTheLine(t *testing.T) {
	for _, c := range []struct {
		f    Format
		in   string
		line int
		what string
	}{
		{CSV, "", 1, "header"},
		{CSV, "a,b\nc,d\n", 1, "header"},
		{CSV, "key,value,more\n", 1, "fields"},
		{CSV, "key,value\na,b\nc\n", 3, "fields"},
		{CSV, "key,value\na,b\n\"c,d\n", 3, "quote"},
		{CSV, "key,value\na,\"x\ny\"\nc,d", 4, "cut off"},
		{CSV, "key_hex,value\n00,a\nzz,b\n", 3, "key: encoding/hex"},
		{JSONL, `{"key":"a","value":"b"}` + "\n" + `{"key":"a","val`, 2, "cut off"},
		{JSONL, `{"key":"a","value":"b"}`, 1, "cut off"},
		{JSONL, "\n\n{}\n", 3, "want one of key"},
		{JSONL, `{"key":"a"}` + "\n", 1, "want one of value"},
		{JSONL, `{"key":"a","key_hex":"00","value":""}` + "\n", 1, "want one of key"},
		{JSONL, `{"key":"a","value":"b","ttl":3}` + "\n", 1, "ttl"},
		{JSONL, `{"key":"a","value":"b"} {}` + "\n", 1, "more than one"},
		{JSONL, `{"key_base64":"?","value":"b"}` + "\n", 1, "key_base64"},
		{JSONL, "{\"key\":\"\xff\",\"value\":\"b\"}\n", 1, "UTF-8"},
		{JSONL, "[]\n", 1, "array"},
	} {
		_, r, err := readAll(c.f, c.in)
		var le *LineError
		require.ErrorAs(t, err, &le, "%q", c.in)
		require.Equal(t, c.line, le.Line, "%q: %v", c.in, err)
		require.ErrorContains(t, err, c.what, "%q", c.in)
		_, _, again := r.Next()
		require.Equal(t, err, again, "the error stays")
	}
	got, r, err := readAll(CSV, "value_base64,key\nAP8=,k\n")
	require.NoError(t, err)
	require.Equal(t, []pair{{[]byte("k"), []byte{0, 0xff}}}, got)
	require.Equal(t, 2, r.Line())
}

// endless is a line without an end.
type endless struct{ n int }

func (e *endless) Read(b []byte) (int, error) {
	if e.n > 2*MaxLineBytes {
		return 0, errors.New("read too far")
	}
	for i := range b {
		b[i] = 'x'
	}
	e.n += len(b)
	return len(b), nil
}

func TestLinesAreBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("256 MiB of input; not with -short")
	}
	for _, f := range []Format{CSV, JSONL} {
		_, _, err := NewReader(&endless{}, f).Next()
		require.ErrorIs(t, err, errLong, f)
	}
}

func FuzzReader(f *testing.F) {
	for _, s := range []string{"key,value\na,b\n", `{"key":"a","value":"b"}` + "\n", "key_hex,value\n00,\"x\"\"\n\"\n", "{"} {
		f.Add(s, true)
		f.Add(s, false)
	}
	f.Fuzz(func(t *testing.T, in string, isCSV bool) {
		format := JSONL
		if isCSV {
			format = CSV
		}
		got, _, err := readAll(format, in)
		if err != nil {
			return
		}
		// What was read can be written and read again.
		var b bytes.Buffer
		w := NewWriter(&b, format, Hex)
		for _, p := range got {
			require.NoError(t, w.Put(p.key, p.value))
		}
		require.NoError(t, w.Flush())
		again, _, err := readAll(format, b.String())
		require.NoError(t, err)
		require.Len(t, again, len(got))
	})
}
