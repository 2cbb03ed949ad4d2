package redis

import (
	"bytes"
	"errors"
	"math"
	"math/big"
	"strconv"
)

// longBits is the mantissa of the long double of x86, with which Redis counts in
// INCRBYFLOAT.
const longBits = 64

// maxNumberBytes bounds how numbers are written, as in Redis.
const maxNumberBytes = 5 << 10

// parseLong reads a number for INCRBYFLOAT. inf is not nil.
func parseLong(b []byte) (*big.Float, bool) {
	if len(b) == 0 || len(b) >= maxNumberBytes || space(b[0]) || bytes.IndexByte(b, '_') >= 0 || !numeric(b) {
		return nil, false
	}
	f := new(big.Float).SetPrec(longBits)
	base := 10
	if hexNumber(b) {
		base = 0
	}
	f, _, err := f.Parse(string(b), base)
	if err != nil {
		return nil, false
	}
	if !f.IsInf() && f.MantExp(nil) > 16384 {
		return nil, false // more than a long double holds
	}
	return f, true
}

// parseFloat reads a score.
func parseFloat(b []byte) (float64, bool) {
	if len(b) == 0 || len(b) >= maxNumberBytes || space(b[0]) {
		return 0, false
	}
	f, err := float(b)
	if err != nil || f == 0 && !zero(b) {
		return 0, false // also what is too small for anything but 0
	}
	return f, true
}

// parseLimit reads an end of a range of scores, which may be out of range, begin
// with blanks or be left out.
func parseLimit(b []byte) (float64, bool) {
	if b = bytes.TrimLeft(b, " \t\n\v\f\r"); len(b) == 0 {
		return 0, true
	}
	f, err := float(b)
	return f, err == nil || errors.Is(err, strconv.ErrRange)
}

// float reads a number as C does; never NaN.
func float(b []byte) (float64, error) {
	if len(b) >= maxNumberBytes || bytes.IndexByte(b, '_') >= 0 || !numeric(b) {
		return 0, strconv.ErrSyntax
	}
	s := string(b)
	if hexNumber(b) && !bytes.ContainsAny(b, "pP") {
		s += "p0"
	}
	f, err := strconv.ParseFloat(s, 64)
	if math.IsNaN(f) {
		err = strconv.ErrSyntax
	}
	return f, err
}

// zero says whether a number is written with no digit but 0.
func zero(b []byte) bool {
	if i := bytes.IndexAny(b, "eEpP"); i >= 0 {
		b = b[:i]
	}
	return !bytes.ContainsAny(b, "123456789abcdfABCDF")
}

// hexNumber says whether b is a number in hexadecimal, which Go reads and Redis does not.
func hexNumber(b []byte) bool {
	b = bytes.TrimLeft(b, "+-")
	return len(b) > 1 && b[0] == '0' && (b[1] == 'x' || b[1] == 'X')
}

// numeric refuses what the parsers of Go take and C does not, such as 0b1 and 0o7.
func numeric(b []byte) bool {
	b = bytes.TrimLeft(b, "+-")
	return len(b) < 2 || b[0] != '0' || bytes.IndexByte([]byte("bBoO"), b[1]) < 0
}

// appendLong prints a number as Redis does for people: 17 digits after the point,
// without the zeros at the end.
func appendLong(dst []byte, f *big.Float) []byte {
	b := f.Append(nil, 'f', 17)
	if bytes.IndexByte(b, '.') >= 0 {
		b = bytes.TrimRight(b, "0")
		b = bytes.TrimSuffix(b, []byte("."))
	}
	if string(b) == "-0" {
		b = b[1:]
	}
	return append(dst, b...)
}
