package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/quarrystore/quarry/proto"
)

// coldBytes is the memory that copies come from: far above any cache.
const coldBytes = 512 << 20

func yardsticks(ctx context.Context, cfg Config, tell func(Row)) error {
	d := min(cfg.Job.Duration, time.Second)
	cold := make([]byte, coldBytes)
	for i := range cold {
		cold[i] = byte(i >> 6)
	}
	for _, size := range cfg.Sizes {
		if size <= proto.MaxSlabBytes {
			tell(memory("copy", size, d, cold, false))
			tell(memory("copy+checksum", size, d, cold, true))
		}
	}
	cold = nil
	for _, size := range cfg.Sizes {
		if size > proto.MaxSlabBytes {
			continue
		}
		r, err := pingPong(ctx, cfg.Command("pingpong"), size, d)
		if err != nil {
			return fmt.Errorf("TCP ping-pong: %w", err)
		}
		tell(r)
	}
	return redis(ctx, cfg, d, tell)
}

// memory copies cold bytes, and hashes the copy as a checksum is.
func memory(name string, size int, d time.Duration, cold []byte, checksum bool) Row {
	n := max(size, 1)
	dst := make([]byte, n)
	h := newHist()
	var ops int64
	var sum uint64
	seed := uint64(88172645463325252)
	start := time.Now()
	last := start
	for last.Sub(start) < d {
		seed ^= seed << 13
		seed ^= seed >> 7
		seed ^= seed << 17
		at := int(seed%uint64(len(cold)-n)) &^ 63
		copy(dst, cold[at:at+n])
		if checksum {
			sum ^= xxh3.HashSeed(dst, seed)
		}
		now := time.Now()
		record(h, int64(now.Sub(last)))
		last = now
		ops++
	}
	runtime.KeepAlive(sum)
	r := Row{What: "memory", Op: name, Bytes: size, Clients: 1, Processes: 1}
	r.quantiles(h)
	r.rate(ops, last.Sub(start))
	return r
}

// PingPong serves the other side of the ping-pong: for each request, 8 bytes with
// a length, that many bytes. It prints its address and serves one connection.
func PingPong(out io.Writer) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	fmt.Fprintln(out, l.Addr())
	c, err := l.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	var q [32]byte // as large as the request for one READ
	answer := make([]byte, proto.MaxSlabBytes+64)
	for {
		if _, err := io.ReadFull(c, q[:]); err != nil {
			return nil
		}
		n := binary.LittleEndian.Uint64(q[:])
		if n > uint64(len(answer)) {
			return fmt.Errorf("ping-pong of %d bytes", n)
		}
		if _, err := c.Write(answer[:n]); err != nil {
			return nil
		}
	}
}

func pingPong(ctx context.Context, command []string, size int, d time.Duration) (Row, error) {
	r := Row{What: "tcp socket", Op: "ping-pong", Bytes: size, Clients: 1, Processes: 1}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := cmd.Start(); err != nil {
		return r, err
	}
	defer cmd.Wait()
	defer cancel()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return r, err
	}
	c, err := net.Dial("tcp", strings.TrimSpace(addr))
	if err != nil {
		return r, err
	}
	defer c.Close()
	var q [32]byte
	answer := make([]byte, max(size, 1))
	binary.LittleEndian.PutUint64(q[:], uint64(len(answer)))
	h := newHist()
	var ops int64
	start := time.Now()
	last := start
	for last.Sub(start) < d && ctx.Err() == nil {
		if _, err := c.Write(q[:]); err != nil {
			return r, err
		}
		if _, err := io.ReadFull(c, answer); err != nil {
			return r, err
		}
		now := time.Now()
		record(h, int64(now.Sub(last)))
		last = now
		ops++
	}
	r.quantiles(h)
	r.rate(ops, last.Sub(start))
	return r, ctx.Err()
}

// clients runs f for each client at once and sums what they did.
func clients(n int, f func(i int) (*outcome, error)) (*outcome, error) {
	outs := make([]*outcome, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { outs[i], errs[i] = f(i) })
	}
	wg.Wait()
	sum := &outcome{hist: newHist()}
	for i := range n {
		if errs[i] != nil {
			return nil, errs[i]
		}
		sum.hist.Merge(outs[i].hist)
		sum.Ops += outs[i].Ops
		sum.Calls += outs[i].Calls
		sum.Elapsed = max(sum.Elapsed, outs[i].Elapsed)
	}
	return sum, nil
}
