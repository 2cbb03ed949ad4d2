package clientsim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

// This file has clients at work on a space. Words that clients change by Store64 and CAS64 are registers of the history; a word counts what
// Add64 has added; and each goroutine has ranges of its own, of which what was acknowledged must be found at the end.

const (
	spaceName  = "space"
	spaceBytes = 1 << 20 // of each of its two regions
	registers  = 3
	counterAt  = 8 * registers // offset of the counter
	rangesAt   = 64            // ranges; half of them lie before the border of the regions, and one over it
	rangeWords = 40
	ranges     = 4 // of each goroutine
)

// spaceWork is what is known of the space.
type spaceWork struct {
	mu      sync.Mutex
	added   uint64 // acknowledged
	unsure  uint64 // additions that may have been made
	written map[uint64]*contents
}

// contents of a range: its words have the value that was acknowledged last, or one whose Write had no sure answer. Such a Write of a client has no effect behind a later
// one of that client that was acknowledged; that of another client, which has died, may.
type contents struct {
	sure   uint64
	unsure map[uint64]*incarnation
}

// makeSpace makes the space, with registers that have a value.
func (r *run) makeSpace(ctx context.Context) error {
	r.space.written = map[uint64]*contents{}
	p, cl, err := r.Client(ctx, "makes the space", client.Config{Lanes: 1, Replicas: r.opt.replicas()})
	if err != nil {
		return err
	}
	defer p.cancel()
	s, err := space.Create(ctx, cl, spaceName, 2*spaceBytes, space.Options{RegionBytes: spaceBytes})
	for i := 0; i < registers && err == nil; i++ {
		e := op{kind: opPut, who: "first", call: r.h.now(), at: r.now(), in: r.h.value()}
		if err = s.Store64(ctx, s.Base()+uint64(8*i), e.in); err == nil {
			r.h.add(fmt.Sprintf("word%d", i), e)
		}
	}
	return errors.Join(err, cl.Close())
}

// spaceOp is one operation on the space.
func (r *run) spaceOp(w *worker, l *incarnation, g int) {
	s, err := space.Open(r.ctx, l.cl, spaceName)
	if err != nil {
		return
	}
	i := r.intn(registers)
	name, at := fmt.Sprintf("word%d", i), s.Base()+uint64(8*i)
	switch n := r.intn(100); {
	case n < 25:
		e := r.begin(l, opGet)
		err := w.call(r.ctx, l, "load "+name, func(ctx context.Context) (err error) { e.out, err = s.Load64(ctx, at); return err })
		if err == nil {
			r.h.add(name, e)
		}
	case n < 40:
		e := r.begin(l, opWrite)
		e.in = r.h.value()
		err := w.call(r.ctx, l, "store "+name, func(ctx context.Context) error { return s.Store64(ctx, at, e.in) })
		r.sent(&object{name: name}, e, err)
	case n < 60:
		r.swapWord(w, l, s, name, at)
	case n < 75:
		err := w.call(r.ctx, l, "add", func(ctx context.Context) error { _, err := s.Add64(ctx, s.Base()+counterAt, 1); return err })
		r.space.mu.Lock()
		defer r.space.mu.Unlock()
		if res, ok := outcome(err); ok && res == done {
			r.space.added++
		} else if ok {
			r.space.unsure++
		}
	default:
		r.writeRange(w, l, s, uint64((w.id*r.opt.Workers+g)*ranges+r.intn(ranges)))
	}
}

// swapWord reads a word and swaps it. The history's operation begins behind the read.
func (r *run) swapWord(w *worker, l *incarnation, s *space.Space, name string, at uint64) {
	var e op
	swapped := false
	err := w.call(r.ctx, l, "swap "+name, func(ctx context.Context) error {
		old, err := s.Load64(ctx, at)
		if err != nil {
			return errNothing
		}
		e = r.begin(l, opUpdate)
		e.in, e.out = r.h.value(), old
		_, swapped, err = s.CAS64(ctx, at, old, e.in)
		return err
	})
	if errors.Is(err, errNothing) || err == nil && !swapped {
		return
	}
	r.sent(&object{name: name}, e, err)
}

// rangeAt is the address of a range. They lie on both sides of the border, and one over it.
func rangeAt(s *space.Space, number uint64) uint64 {
	return s.Base() + spaceBytes - 8*rangesAt*rangeWords/2 + 8*rangeWords*number + 8
}

func (r *run) writeRange(w *worker, l *incarnation, s *space.Space, number uint64) {
	v := r.h.value()
	b := make([]byte, 8*rangeWords)
	for i := range rangeWords {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	err := w.call(r.ctx, l, "write a range", func(ctx context.Context) error {
		_, err := s.Write(ctx, b, rangeAt(s, number))
		return err
	})
	r.space.mu.Lock()
	defer r.space.mu.Unlock()
	c := r.space.written[number]
	if c == nil {
		c = &contents{unsure: map[uint64]*incarnation{}}
		r.space.written[number] = c
	}
	if res, ok := outcome(err); ok && res == done {
		c.sure = v
		maps.DeleteFunc(c.unsure, func(_ uint64, of *incarnation) bool { return of == l })
	} else if ok {
		c.unsure[v] = l
	}
}

// checkSpace reads everything a last time.
func (r *run) checkSpace(ctx context.Context, cl *client.Client) {
	s, err := space.Open(ctx, cl, spaceName)
	if err != nil {
		r.fail("open the space at the end: %v", err)
		return
	}
	for i := range registers {
		e := op{kind: opGet, who: "last", call: r.h.now(), at: r.now()}
		if e.out, err = s.Load64(ctx, s.Base()+uint64(8*i)); err != nil {
			r.fail("word %d at the end: %v", i, err)
		}
		r.h.add(fmt.Sprintf("word%d", i), e)
	}
	if n, err := s.Load64(ctx, s.Base()+counterAt); err != nil || n < r.space.added || n > r.space.added+r.space.unsure {
		r.fail("%d additions were acknowledged and %d may have been made: the word is %d (%v)", r.space.added, r.space.unsure, n, err)
	}
	for number, c := range r.space.written {
		b := make([]byte, 8*rangeWords)
		if _, err := s.Read(ctx, b, rangeAt(s, number)); err != nil {
			r.fail("range %d at the end: %v", number, err)
		}
		for i := range rangeWords {
			if v := binary.LittleEndian.Uint64(b[8*i:]); v != c.sure && c.unsure[v] == nil {
				r.fail("word %d of range %d is %d: %d was acknowledged, and %d writes may have been made", i, number, v, c.sure, len(c.unsure))
				break
			}
		}
	}
}
