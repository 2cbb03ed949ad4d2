package litmus

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
)

// refused: the keys of a region change while a chain of a long READ and a WRITE is in
// flight, with no fence flag on the WRITE. A responder may execute the WRITE before it
// refuses the READ. The answer to such a chain must not be "definitely not done".
func refused(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	const at = 1 << 20 // of the WRITE
	l, err := s.lane(ctx)
	if err != nil {
		return 0, 0, "", err
	}
	defer l.to.Conn.Close()
	buf, out := l.buffer(1<<20), l.buffer(8)
	var unknown, executed uint64
	epoch, err := s.Rotate(ctx)
	for ; err == nil && (rounds == 0 || time.Now().Before(until)); rounds++ {
		to := rdma.Target{Conn: l.to.Conn}
		if to.Window, err = l.to.Conn.Open(ctx, 2, epoch); err != nil {
			break
		}
		binary.LittleEndian.PutUint64(out, rounds+1)
		var r rdma.Round
		r.Deadline = clock.In(patience)
		c := r.Chain(&to)
		c.Read(0, buf)
		c.Write(at, out)
		rotated := make(chan error, 1)
		go func() {
			var err error
			epoch, err = s.Rotate(ctx)
			rotated <- err
		}()
		rdma.Do(&r)
		if err = <-rotated; err != nil {
			break
		}
		landed := load(s.Rotated.Bytes(), at) == rounds+1
		switch {
		case c.Err == nil:
		case errors.Is(c.Err, rdma.ErrBroken):
			unknown++
			if landed && c.Done == 0 {
				executed++
			}
			err = l.to.Conn.Reset(ctx)
		case landed && c.Done < 2:
			bad++
		}
	}
	return rounds, bad, fmt.Sprintf("%d answered as unknown, %d of them executed behind the refused READ", unknown, executed), err
}
