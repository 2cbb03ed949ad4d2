package bench

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

func (c *ycsbClient) begin(op string, words int) {
	c.out = append(strconv.AppendInt(append(c.out[:0], '*'), int64(words), 10), "\r\n"...)
	c.add(op)
}

func (c *ycsbClient) add(word string) {
	c.out = append(strconv.AppendInt(append(c.out, '$'), int64(len(word)), 10), "\r\n"...)
	c.out = append(append(c.out, word...), "\r\n"...)
}

// ask sends a command and reads its answer.
func (c *ycsbClient) ask(words ...string) (int, error) {
	c.begin(words[0], len(words))
	for _, w := range words[1:] {
		c.add(w)
	}
	return c.answer()
}

// answer sends what is ready and reads one answer: an integer, the bytes of a string, or the elements of an array, whose
// strings are in found.
func (c *ycsbClient) answer() (int, error) {
	if _, err := c.conn.Write(c.out); err != nil {
		return 0, err
	}
	c.found = c.found[:0]
	n, err := c.reply(false)
	if err != nil {
		return 0, err
	}
	return n, nil
}

func (c *ycsbClient) reply(inArray bool) (int, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return 0, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line == "" {
		return 0, errors.New("an empty answer")
	}
	if line[0] == '+' {
		return 0, nil
	}
	n, err := strconv.Atoi(line[1:])
	if err != nil || line[0] == '-' {
		return 0, fmt.Errorf("answer %q", line)
	}
	switch line[0] {
	case ':':
		return n, nil
	case '$':
		if n < 0 {
			return n, nil
		}
		b := make([]byte, n+2)
		if _, err := io.ReadFull(c.r, b); err != nil {
			return 0, err
		}
		if inArray {
			c.found = append(c.found, string(b[:n]))
		}
		return n, nil
	case '*':
		for range n {
			if _, err := c.reply(true); err != nil {
				return 0, err
			}
		}
		return n, nil
	}
	return 0, fmt.Errorf("answer %q", line)
}

// zipf draws ranks below n: rank k with a probability in proportion to 1/(k+1)^0.99 (Gray and others, "Quickly Generating
// Billion-Record Synthetic Databases", SIGMOD 1994, as in YCSB).
type zipf struct {
	n                int
	alpha, zeta, eta float64
}

const zipfTheta = 0.99

func newZipf(n int) *zipf {
	z := &zipf{n: n, alpha: 1 / (1 - zipfTheta)}
	for i := range n {
		z.zeta += math.Pow(float64(i+1), -zipfTheta)
	}
	two := 1 + math.Pow(2, -zipfTheta)
	z.eta = (1 - math.Pow(2/float64(n), 1-zipfTheta)) / (1 - two/z.zeta)
	return z
}

// rank of a number that is uniform between 0 and 1.
func (z *zipf) rank(u float64) int {
	switch uz := u * z.zeta; {
	case uz < 1:
		return 0
	case uz < 1+math.Pow(2, -zipfTheta):
		return min(1, z.n-1)
	}
	return min(z.n-1, int(float64(z.n)*math.Pow(z.eta*u-z.eta+1, z.alpha)))
}

// scramble spreads numbers: FNV-1a of their 8 bytes, as in YCSB.
func scramble(n uint64) uint64 {
	h := uint64(0xcbf29ce484222325)
	for range 8 {
		h = (h ^ n&0xff) * 0x100000001b3
		n >>= 8
	}
	return h
}
