package litmus

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

const contenders = 4

// casCAS: every lane increments one word by CAS and repeats a CAS that fails.
func casCAS(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, contenders)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	var won, tried atomic.Uint64
	err = together(contenders, func(i int) error {
		var seen uint64
		for time.Now().Before(until) {
			c, err := lanes[i].do(func(c *rdma.Chain) { c.CAS(0, seen, seen+1) })
			if err != nil {
				return err
			}
			tried.Add(1)
			if old := c.Verbs[0].Old; old == seen {
				won.Add(1)
				seen++
			} else {
				seen = old
			}
		}
		return nil
	})
	if err != nil {
		return tried.Load(), 0, "", err
	}
	return tried.Load(), distance(won.Load(), load(s.Memory.Bytes(), 0)), fmt.Sprintf("%d succeeded", won.Load()), nil
}

func distance(a, b uint64) uint64 {
	if a > b {
		return a - b
	}
	return b - a
}

// addAdd: every lane adds to one word, several at a time.
func addAdd(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, contenders)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	var done atomic.Uint64
	err = together(contenders, func(i int) error {
		for time.Now().Before(until) {
			if _, err := lanes[i].do(adds); err != nil {
				return err
			}
			done.Add(chainAdds)
		}
		return nil
	})
	if err != nil {
		return done.Load(), 0, "", err
	}
	return done.Load(), distance(done.Load(), load(s.Memory.Bytes(), 0)), "", nil
}

const chainAdds = 16

func adds(c *rdma.Chain) {
	for range chainAdds {
		c.FetchAdd(0, 1)
	}
}

// casWrite: one lane WRITEs marked values to the word, another lane does a CAS from the
// value that it saw last. A WRITE whose value neither the CAS lane nor a later READ has seen
// was lost between the read and the write of a CAS.
func casWrite(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 2)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	const mark = 1 << 63
	// What the CAS lane saw, and how many CASes it has finished.
	var last, turns atomic.Uint64
	var over atomic.Bool
	err = together(2, func(i int) error {
		if i == 0 {
			var seen uint64
			for !over.Load() {
				c, err := lanes[0].do(func(c *rdma.Chain) { c.CAS(0, seen, seen&^mark+1) })
				if err != nil {
					return err
				}
				if old := c.Verbs[0].Old; old == seen {
					seen = seen&^mark + 1
				} else {
					seen = old
					if seen&mark != 0 {
						last.Store(seen)
					}
				}
				turns.Add(1)
			}
			return nil
		}
		defer over.Store(true)
		buf := lanes[1].buffer(8)
		for n := uint64(1); time.Now().Before(until); n++ {
			mine := mark | n<<24
			binary.LittleEndian.PutUint64(buf, mine)
			if _, err := lanes[1].do(func(c *rdma.Chain) { c.Write(0, buf) }); err != nil {
				return err
			}
			rounds++
			// Two complete CASes later the value has been seen, or it is lost.
			for from := turns.Load(); turns.Load() < from+3; {
				if time.Now().After(until) {
					return nil
				}
			}
			if last.Load() != mine {
				bad++
			}
		}
		return nil
	})
	return rounds, bad, "the protocols never WRITE a word that is CASed", err
}

// cpuAdapter: a processor and a lane increment one word.
func cpuAdapter(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 1)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	mem := s.Memory.Bytes()
	var over atomic.Bool
	var here, there uint64
	err = together(2, func(i int) error {
		if i == 0 {
			for ; !over.Load(); here++ {
				add(mem, 0, 1)
			}
			return nil
		}
		defer over.Store(true)
		for ; time.Now().Before(until); there += chainAdds {
			if _, err := lanes[0].do(adds); err != nil {
				return err
			}
		}
		return nil
	})
	bad = distance(here+there, load(mem, 0))
	note = "none lost in this run; regions are in the adapter's domain all the same"
	if bad > 0 {
		note = "two domains: regions of this device are the adapter's alone"
	}
	return here + there, bad, note, err
}
