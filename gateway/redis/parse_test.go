package redis

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// commands parses all of b, given in pieces of so many bytes, as a connection does.
func commands(t testing.TB, b []byte, piece int) (out []string, err error) {
	var p parser
	var buf []byte
	for from := 0; from < len(b); from += piece {
		buf = append(buf, b[from:min(len(b), from+piece)]...)
		at := 0
		for {
			p.words = p.words[:0]
			n, argc, err := p.next(buf[at:])
			if err != nil {
				return out, err
			}
			if n == 0 {
				break
			}
			if n < 0 || at+n > len(buf) || argc != len(p.words) {
				t.Fatalf("%d bytes of %d, %d of %d words", n, len(buf)-at, argc, len(p.words))
			}
			at += n
			if argc > 0 {
				out = append(out, fmt.Sprintf("%q", p.words))
			}
		}
		if need := p.needs(); need > maxCommandBytes+2 {
			t.Fatalf("needs %d bytes", need)
		}
		buf = append(buf[:0], buf[at:]...) // the rest moves to the front, as in a connection
	}
	return out, nil
}

// FuzzParser: what comes is cut the same however it is cut on the way, and nothing
// that comes makes trouble.
func FuzzParser(f *testing.F) {
	for _, s := range []string{
		"*1\r\n$4\r\nPING\r\n", "*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING\r\n", "PING\r\nSET a \"b\\x41\\n\"\r\n", "*0\r\n*-1\r\n", "*1\r\n$-1\r\n", "*99999999999\r\n",
		"*2\r\n$3\r\nGET\r\n:1\r\n", "\r\n\r\n", "set 'a b' \"c\n", "*1\r\n$0\r\n\r\n", "*1\n$4\nPING\n", "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$5\r\nb\r\nc\r\r\n", "$4\r\nPING\r\n", "1\x00\x00*1\r\n", "\"a\x00\"\r\n", "*1\r\n$70000000\r\n",
	} {
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, b []byte, piece int) {
		whole, wholeErr := commands(t, b, max(1, len(b)))
		pieces, err := commands(t, b, 1+abs(piece)%16)
		require.Equal(t, whole, pieces)
		require.Equal(t, fmt.Sprint(wholeErr), fmt.Sprint(err))
	})
}

func abs(n int) int { return max(n, -(n + 1)) }

func TestParser(t *testing.T) {
	for in, want := range map[string]string{
		"*1\r\n$4\r\nPING\r\n":                  `["PING"]`,
		"*2\r\n$1\r\n\r\r\n$0\r\n\r\n":          `["\r" ""]`,
		"*-5\r\n*0\r\nPING\r\n":                 `["PING"]`,
		"set k \"a\\x00\\n\\\"\" 'it\\'s'\n":    `["set" "k" "a\x00\n\"" "it's"]`,
		"   \r\n get   k  \r\n":                 `["get" "k"]`,
		"1\x00\x00*1\r\nPING\n":                 `["1"] ["PING"]`,
		"a\"b\"\r\n":                            `["ab"]`,
		"*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nPI":    `["PING"]`,
		"*x\r\n":                                "invalid multibulk length",
		"*1048577\r\n":                          "invalid multibulk length",
		"*1\r\nx\r\n":                           "expected '$', got 'x'",
		"*1\r\n\r\n\r\n":                        "expected '$', got '\r'",
		"*1\r\n$-1\r\n":                         "invalid bulk length",
		"*1\r\n$67108865\r\n":                   "invalid bulk length",
		"*1\r\n$01\r\n":                         "invalid bulk length",
		"a \"b\r\n":                             "unbalanced quotes in request",
		"a 'b'c\r\n":                            "unbalanced quotes in request",
		strings.Repeat("a", maxLineBytes):       "too big inline request",
		"*" + strings.Repeat("1", maxLineBytes): "too big mbulk count string",
		"*1\r\n$" + strings.Repeat("1", 70_000): "too big bulk count string",
	} {
		out, err := commands(t, []byte(in), len(in))
		got := strings.Join(out, " ")
		if err != nil {
			got = strings.TrimPrefix(err.Error(), "Protocol error: ")
		}
		require.Equal(t, want, got, "%.40q", in)
	}
	// The whole command is bounded, too.
	var b bytes.Buffer
	fmt.Fprintf(&b, "*3\r\n$%d\r\n%s\r\n$%d\r\n", maxBulkBytes, make([]byte, maxBulkBytes), maxBulkBytes)
	_, err := commands(t, b.Bytes(), b.Len())
	require.ErrorContains(t, err, "too big command")
}

func TestLimitsBeforeThePassword(t *testing.T) {
	for in, want := range map[string]string{"*11\r\n": "unauthenticated multibulk length", "*2\r\n$4\r\nAUTH\r\n$16385\r\n": "unauthenticated bulk length"} {
		p := parser{preAuth: true}
		_, _, err := p.next([]byte(in))
		require.ErrorContains(t, err, want)
	}
}

func TestIntegers(t *testing.T) {
	for _, n := range []int64{0, 1, -1, 10, math.MaxInt64, math.MinInt64, math.MaxInt64 - 1} {
		got, ok := parseInt(strconv.AppendInt(nil, n, 10))
		require.True(t, ok)
		require.Equal(t, n, got)
	}
	for _, s := range []string{"", "-", "+1", "00", "01", "-0", "-01", " 1", "1 ", "1a", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "99999999999999999999"} {
		_, ok := parseInt([]byte(s))
		require.False(t, ok, s)
	}
}

func FuzzMatch(f *testing.F) {
	f.Add([]byte("a*b?c[^x-z]\\*"), []byte("aXbYcq*"))
	f.Add([]byte(strings.Repeat("*a", 40)), []byte(strings.Repeat("a", 200)+"b"))
	f.Add([]byte("[z-a"), []byte("m"))
	f.Fuzz(func(t *testing.T, p, s []byte) {
		if len(p) > 1000 || len(s) > 1000 {
			return
		}
		if match(p, s, false) && !bytes.HasPrefix(s, literal(p)) {
			t.Fatalf("%q matches %q but does not begin with %q", s, p, literal(p))
		}
		// Without specials a pattern is itself.
		if len(literal(p)) == len(p) {
			require.Equal(t, bytes.Equal(p, s), match(p, s, false))
		}
	})
}

func TestScoresSort(t *testing.T) {
	scores := []float64{math.Inf(-1), -1e300, -2, -1.5, -1e-300, 0, 1e-300, 1, 1.5, 2, 1e300, math.Inf(1)}
	for i, f := range scores {
		require.Equal(t, f, fromOrderBits(orderBits(f)))
		if i > 0 {
			require.Less(t, orderBits(scores[i-1]), orderBits(f))
		}
	}
	require.Equal(t, orderBits(0), orderBits(math.Copysign(0, -1)))
}

func TestLongNumbers(t *testing.T) {
	add := func(a, b string) string {
		x, ok := parseLong([]byte(a))
		require.True(t, ok)
		y, ok := parseLong([]byte(b))
		require.True(t, ok)
		return string(appendLong(nil, new(big.Float).SetPrec(longBits).Add(x, y)))
	}
	require.Equal(t, "10.6", add("10.5", "0.1"))
	require.Equal(t, "5200", add("5.0e3", "2.0e2"))
	require.Equal(t, "0", add("1", "-1"))
	require.Equal(t, "3", add("3", "-0"))
	for _, s := range []string{"", " 1", "1 ", "x", "nan", "0b1", "1_0", "1e5000"} {
		_, ok := parseLong([]byte(s))
		require.False(t, ok, s)
	}
}

// FuzzRecords: no bytes of the tree make trouble.
func FuzzRecords(f *testing.F) {
	f.Add(AppendString(nil, []byte("value")))
	f.Add(appendFamily(nil, kindHash, 12345, 77))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decode(b, 1, 0)
		if err == nil && r.kind != kindNone && !r.dying && b[0]&0x20 == 0 && (r.kind == kindString || !r.raw) && (r.expiry > 0 || b[0]&flagTime == 0) {
			require.Equal(t, b, r.retimed(nil, r.expiry))
		}
		_, _ = decodeOwner(b)
	})
}

func TestRestOfTheSweep(t *testing.T) {
	require.Equal(t, 4*time.Second, (&pass{}).rest(2*time.Second))
	require.Equal(t, maxRest, (&pass{}).rest(maxRest))
	require.Equal(t, busyRest, (&pass{timed: 1}).rest(maxRest))
	require.Equal(t, busyRest, (&pass{removed: 1}).rest(maxRest))
	s := &Server{}
	s.noteTime(AppendString(nil, nil))
	require.False(t, s.timed.Load())
	s.noteTime(appendHead(nil, kindString, 5))
	require.True(t, s.timed.Load())
}

func TestRecords(t *testing.T) {
	r, err := decode(appendFamily(nil, kindZset, 1000, 42), 5, 999)
	require.NoError(t, err)
	require.Equal(t, record{kind: kindZset, expiry: 1000, id: 42, version: 5}, r)
	r, err = decode(appendFamily(nil, kindZset, 1000, 42), 5, 1000)
	require.NoError(t, err)
	require.Equal(t, record{kind: kindNone, expiry: 1000, id: 42, version: 5}, r, "past its expiry")
	for _, b := range [][]byte{nil, {0}, {9}, {kindHash, 1}, {kindString | flagTime, 1}} {
		_, err := decode(b, 1, 0)
		require.ErrorIs(t, err, errRecord)
	}
	require.Equal(t, []byte{5, 1}, after([]byte{5, 0, 0xff}))
	require.Nil(t, after([]byte{0xff, 0xff}))
}
