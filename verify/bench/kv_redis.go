package bench

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os/exec"
	"time"
)

// kvRedis measures GET and SET of as many keys as our trees have, over a unix socket,
// one command at a time, if a redis-server is installed.
func kvRedis(ctx context.Context, cfg Config, tell func(Row)) error {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil // not installed: no yardstick
	}
	keys := cfg.Job.Objects
	if keys == 0 {
		keys = kvKeys
	}
	for _, size := range cfg.Sizes {
		_, socket, stop, err := startRedis(ctx, path)
		if err != nil {
			return fmt.Errorf("redis-server: %w", err)
		}
		err = func() error {
			defer stop()
			if err := redisFill(ctx, "unix", socket, keys, size); err != nil {
				return err
			}
			for _, op := range []string{"GET", "SET"} {
				o, err := clients(cfg.Job.Clients, func(i int) (*outcome, error) {
					return redisKVLoop(ctx, "unix", socket, op, i, keys, size, 1, min(cfg.Job.Duration, 2*time.Second))
				})
				if err != nil {
					return err
				}
				r := Row{What: "redis unix", Op: op, Bytes: size, Clients: cfg.Job.Clients, Processes: 1}
				r.quantiles(o.hist)
				r.rate(o.Ops, o.Elapsed)
				tell(r)
			}
			return nil
		}()
		if err != nil {
			return fmt.Errorf("redis with %d keys of %d bytes: %w", keys, size, err)
		}
	}
	return nil
}

func redisFill(ctx context.Context, network, addr string, keys, size int) error {
	c, err := net.Dial(network, addr)
	if err != nil {
		return err
	}
	defer c.Close()
	r := bufio.NewReaderSize(c, 64<<10)
	value, key := make([]byte, size), []byte(nil)
	var out []byte
	for i := 0; i < keys; {
		out = out[:0]
		n := 0
		for ; n < 64 && i < keys; n, i = n+1, i+1 {
			key = appendKey(key[:0], i)
			out = bulk(bulk(append(out, "*3\r\n$3\r\nSET\r\n"...), key), value)
		}
		if err := exchange(c, r, out, n, -1); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

func redisKVLoop(ctx context.Context, network, addr, op string, id, keys, size, pipeline int, d time.Duration) (*outcome, error) {
	c, err := net.Dial(network, addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r := bufio.NewReaderSize(c, 64<<10)
	value, key := make([]byte, size), []byte(nil)
	seed := random(uint64(id+1) * 0x9e3779b97f4a7c15)
	return redisAsk(ctx, c, r, op, size, pipeline, d, func(out []byte) []byte {
		key = appendKey(key[:0], seed.next(keys))
		if op == "GET" {
			return bulk(append(out, "*2\r\n$3\r\nGET\r\n"...), key)
		}
		return bulk(bulk(append(out, "*3\r\n$3\r\nSET\r\n"...), key), value)
	})
}
