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

// revoked: as many WRITEs as a chain holds are under way when their session is fenced;
// the memory is looked at from then on.
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
		fill(out, n)
		var r rdma.Round
		c := r.Chain(&l.to)
		for i := range uint64(rdma.MaxChainVerbs) {
			c.Write(i*size, out)
		}
		posted := make(chan struct{})
		go func() { // on a provider that executes in Post, the fence still comes in between
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
			time.Sleep(time.Millisecond) // gives what must not come a chance to come
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
