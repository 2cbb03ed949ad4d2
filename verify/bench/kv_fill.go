package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
)

// KVFill is the memory that a tree takes for each key, by the order in which the keys come: the blocks
// of regions that are in use on all nodes and were not before, beside what redis-server says that it
// uses for the same keys and values. Others must not use the cluster meanwhile.
const KVFill = "kv-fill"

const (
	fillKeys  = 200_000 // unless told otherwise
	fillFeeds = 1000
)

// fillOrder is an order of keys.
type fillOrder struct {
	name   string
	loaded bool // by Load; else put one by one
	key    func(b []byte, i, n int) []byte
}

var fillOrders = []fillOrder{
	{"sorted load", true, func(b []byte, i, _ int) []byte { return appendKey(b, i) }},
	{"random puts", false, func(b []byte, i, n int) []byte { return appendKey(b, shuffled(i, n)) }},
	{"one rising feed", false, func(b []byte, i, _ int) []byte { return appendKey(b, i) }},
	{"rising feeds", false, func(b []byte, i, _ int) []byte {
		return fmt.Appendf(b, "src%04d:%08d", i%fillFeeds, i/fillFeeds)
	}},
	{"key:1 key:2 ...", false, func(b []byte, i, _ int) []byte { return strconv.AppendInt(append(b, "key:"...), int64(i), 10) }},
}

// fill measures all orders, each in a tree of its own beside the others.
func (b *kvBench) fill(ctx context.Context, cfg Config, what string, tell func(Row)) error {
	n := b.j.Objects
	if n == 0 {
		n = fillKeys
	}
	redis, err := exec.LookPath("redis-server")
	if err != nil || !cfg.Yardsticks {
		redis = ""
	}
	before, err := cfg.Used(ctx)
	if err != nil {
		return err
	}
	for _, o := range fillOrders {
		r := Row{What: what, Op: KVFill, Order: o.name, Keys: n, Bytes: b.j.Bytes, Clients: 1, Processes: 1, Replicas: b.j.Replicas}
		start := time.Now()
		t, err := b.filled(ctx, o, n)
		r.rate(int64(n), time.Since(start))
		if t != nil {
			defer t.Drop(context.WithoutCancel(ctx)) // all at the end: the next tree would use its blocks
		}
		if err == nil {
			var after int64
			if after, err = cfg.Used(ctx); err == nil {
				r.perKey(o, after-before)
				tell(r)
			}
			before = after
		}
		if err == nil && redis != "" {
			err = b.fillRedis(ctx, redis, o, n, tell)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
	}
	return nil
}

func (r *Row) perKey(o fillOrder, bytes int64) {
	r.BytesPerKey = float64(bytes) / float64(r.Keys)
	r.Note = fmt.Sprintf("%s: %.0f B a key, of them %d of value", o.name, r.BytesPerKey, r.Bytes)
}

// filled makes a tree with the keys of an order.
func (b *kvBench) filled(ctx context.Context, o fillOrder, n int) (*kv.Tree, error) {
	t, err := b.create(ctx, "fill")
	if err != nil {
		return nil, err
	}
	var key []byte
	if o.loaded {
		i := 0
		_, err = t.LoadFrom(ctx, func() ([]byte, []byte, error) {
			if i == n {
				return nil, nil, io.EOF
			}
			key = o.key(key[:0], i, n)
			i++
			return key, b.value, ctx.Err()
		})
		return t, err
	}
	for i := range n {
		if err = t.Put(ctx, o.key(key[:0], i, n), b.value); err != nil {
			break
		}
	}
	return t, err
}

// fillRedis measures a redis-server with the same keys.
func (b *kvBench) fillRedis(ctx context.Context, path string, o fillOrder, n int, tell func(Row)) error {
	_, socket, stop, err := startRedis(ctx, path)
	if err != nil {
		return fmt.Errorf("redis-server: %w", err)
	}
	defer stop()
	c, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	defer c.Close()
	in := bufio.NewReaderSize(c, 64<<10)
	before, err := redisUsed(c, in)
	if err != nil {
		return err
	}
	start := time.Now()
	const pipeline = 64
	var key, out []byte
	for i := 0; i < n; {
		k := 0
		for out = out[:0]; k < pipeline && i < n; k, i = k+1, i+1 {
			key = o.key(key[:0], i, n)
			out = bulk(bulk(append(out, "*3\r\n$3\r\nSET\r\n"...), key), b.value)
		}
		if err := exchange(c, in, out, k, -1); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	r := Row{What: "redis", Op: KVFill, Order: o.name, Keys: n, Bytes: b.j.Bytes, Clients: 1, Processes: 1}
	r.rate(int64(n), time.Since(start))
	after, err := redisUsed(c, in)
	if err != nil {
		return err
	}
	r.perKey(o, after-before)
	tell(r)
	return nil
}

// redisUsed is used_memory of INFO memory.
func redisUsed(c net.Conn, in *bufio.Reader) (int64, error) {
	if _, err := c.Write([]byte("*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n")); err != nil {
		return 0, err
	}
	head, err := in.ReadString('\n')
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(head, "$")))
	if err != nil || n < 0 || n > 1<<20 {
		return 0, fmt.Errorf("INFO memory: answer %q", head)
	}
	text := make([]byte, n+2)
	if _, err := io.ReadFull(in, text); err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); ok {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, errors.New("INFO memory: no used_memory")
}
