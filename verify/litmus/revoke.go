package litmus

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// revoked: a full chain of WRITEs is in flight when its session is fenced. No byte of the
// memory may change after the fence has completed.
func revoked(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	const size = 4096
	mem := s.Memory.Bytes()[:rdma.MaxChainVerbs*size]
	var fencing time.Duration
	for n := uint64(1); n == 1 || time.Now().Before(until); n++ {
		l, err := s.lane(ctx)
		if err != nil {
			return rounds, bad, "", err
		}
		out := l.buffer(size)
		// Makes a provider whose send queues grow allocate room for the whole chain.
		_, err = l.do(func(c *rdma.Chain) {
			for range rdma.MaxChainVerbs {
				c.Read(0, out[:8])
			}
		})
		if err != nil {
			return rounds, bad, "", err
		}
		fill(out, n)
		var r rdma.Round
		c := r.Chain(&l.to)
		for i := range uint64(rdma.MaxChainVerbs) {
			c.Write(i*size, out)
		}
		posted := make(chan struct{})
		go func() { // so that the fence overlaps the chain on a provider that executes in Post
			l.to.Conn.Post(c)
			close(posted)
		}()
		for end := time.Now().Add(patience); load(mem, 0) != n; {
			if time.Now().After(end) {
				return rounds, bad, "", fmt.Errorf("no WRITE of round %d has come within %v", n, patience)
			}
		}
		start := time.Now()
		err = s.Fence(ctx, l.serial)
		fencing += time.Since(start)
		if err != nil {
			return rounds, bad, "", err
		}
		after := bytes.Clone(mem)
		for range 3 {
			time.Sleep(time.Millisecond) // gives a WRITE that was not stopped time to arrive
			if !bytes.Equal(after, mem) {
				bad++
				break
			}
		}
		<-posted
		l.to.Conn.Wait(c, clock.In(patience))
		l.to.Conn.Close()
		rounds++
	}
	short := 0
	for i := 0; i < len(mem); i += size {
		if binary.LittleEndian.Uint64(mem[i:]) != rounds {
			short++
		}
	}
	return rounds, bad, fmt.Sprintf("fence mean %v; %d of the last %d WRITEs were cut off", (fencing / time.Duration(rounds)).Round(time.Microsecond), short, rdma.MaxChainVerbs), nil
}
