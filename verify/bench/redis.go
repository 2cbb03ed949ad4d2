package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/quarrystore/quarry/proto"
)

// redis measures GET and SET of a redis-server, without and with pipelining, if
// one is installed.
func redis(ctx context.Context, cfg Config, d time.Duration, tell func(Row)) error {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil // not installed: no yardstick
	}
	addr, _, stop, err := startRedis(ctx, path)
	if err != nil {
		return fmt.Errorf("redis-server: %w", err)
	}
	defer stop()
	n := cfg.Job.Clients * max(1, cfg.Processes)
	for _, size := range cfg.Sizes {
		if size > proto.MaxSlabBytes {
			continue
		}
		for _, k := range []struct {
			op       string
			pipeline int
		}{{"GET", 1}, {"SET", 1}, {"GET", cfg.Job.Batch}, {"SET", cfg.Job.Batch}} {
			o, err := clients(n, func(i int) (*outcome, error) { return redisLoop(ctx, addr, k.op, i, size, k.pipeline, d) })
			if err != nil {
				return fmt.Errorf("redis %s of %d bytes: %w", k.op, size, err)
			}
			r := Row{What: "redis", Op: k.op, Bytes: size, Clients: n, Processes: 1}
			if k.pipeline > 1 {
				r.Batch = k.pipeline
			}
			r.quantiles(o.hist)
			r.rate(o.Ops, o.Elapsed)
			tell(r)
		}
	}
	return nil
}

// startRedis starts a server on a TCP port and a unix socket.
func startRedis(ctx context.Context, path string) (addr, socket string, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", nil, err
	}
	addr = l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(addr)
	dir, err := os.MkdirTemp("", "quarry-redis-")
	if err != nil {
		return "", "", nil, err
	}
	socket = filepath.Join(dir, "s")
	cmd := exec.Command(path, "--port", port, "--unixsocket", socket, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir, "--logfile", filepath.Join(dir, "log"))
	if err := cmd.Start(); err != nil {
		os.RemoveAll(dir)
		return "", "", nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		os.RemoveAll(dir)
	}
	for end := time.Now().Add(10 * time.Second); ; {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
			return addr, socket, stop, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			stop()
			return "", "", nil, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// redisKeys of each client; with payloads they are as many bytes as our objects.
func redisKeys(size int) int { return max(16, min(20_000, workingSetBytes/max(size, 64))) }

// redisLoop is one client with so many commands in flight.
func redisLoop(ctx context.Context, addr, op string, id, size, pipeline int, d time.Duration) (*outcome, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r := bufio.NewReaderSize(c, 256<<10)
	payload := bytes.Repeat([]byte{'q'}, size)
	keys := redisKeys(size)
	var out []byte
	for k := 0; k < keys; {
		out = out[:0]
		n := 0
		for ; k < keys && n < 16; k, n = k+1, n+1 {
			out = appendCommand(out, "SET", id, k, payload)
		}
		if err := exchange(c, r, out, n, -1); err != nil {
			return nil, err
		}
	}
	seed := uint64(id+1) * 0x9e3779b97f4a7c15
	return redisAsk(ctx, c, r, op, size, pipeline, d, func(out []byte) []byte {
		seed ^= seed << 13
		seed ^= seed >> 7
		seed ^= seed << 17
		return appendCommand(out, op, id, int(seed%uint64(keys)), payload)
	})
}

// redisAsk sends pipelines of commands that next appends, until the time is over.
func redisAsk(ctx context.Context, c net.Conn, r *bufio.Reader, op string, size, pipeline int, d time.Duration, next func(out []byte) []byte) (*outcome, error) {
	o := &outcome{hist: newHist()}
	want := -1
	if op == "GET" {
		want = size
	}
	var out []byte
	start := time.Now()
	last := start
	for last.Sub(start) < d && ctx.Err() == nil {
		out = out[:0]
		for range pipeline {
			out = next(out)
		}
		if err := exchange(c, r, out, pipeline, want); err != nil {
			return nil, err
		}
		now := time.Now()
		record(o.hist, int64(now.Sub(last)))
		last = now
		o.Calls++
		o.Ops += int64(pipeline)
	}
	o.Elapsed = last.Sub(start)
	return o, ctx.Err()
}

// appendCommand appends GET key or SET key payload.
func appendCommand(b []byte, op string, id, key int, payload []byte) []byte {
	var name [24]byte
	k := strconv.AppendInt(append(strconv.AppendInt(name[:0], int64(id), 10), ':'), int64(key), 10)
	if op == "GET" {
		b = append(b, "*2\r\n$3\r\nGET\r\n$"...)
	} else {
		b = append(b, "*3\r\n$3\r\nSET\r\n$"...)
	}
	b = append(append(append(strconv.AppendInt(b, int64(len(k)), 10), "\r\n"...), k...), "\r\n"...)
	if op == "GET" {
		return b
	}
	b = strconv.AppendInt(append(b, '$'), int64(len(payload)), 10)
	return append(append(append(b, "\r\n"...), payload...), "\r\n"...)
}

// exchange sends commands and reads their answers: "+OK", or payloads of want bytes.
func exchange(c net.Conn, r *bufio.Reader, out []byte, answers, want int) error {
	if _, err := c.Write(out); err != nil {
		return err
	}
	for range answers {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		switch {
		case want < 0 && line[0] == '+':
		case want >= 0 && line[0] == '$':
			n, err := strconv.Atoi(string(bytes.TrimSpace(line[1:])))
			if err != nil || n != want {
				return fmt.Errorf("answer of %d bytes, want %d", n, want)
			}
			if _, err := r.Discard(n + 2); err != nil {
				return err
			}
		default:
			return errors.New("unexpected answer " + strconv.Quote(string(line)))
		}
	}
	return nil
}
