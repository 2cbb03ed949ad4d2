package slabtest

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/quarrystore/quarry/rdma"
)

// Flaky makes the connections of a lane fail in three ways: a chain never runs, a chain
// runs and its completion is lost, or a chain runs late, at the last moment before the
// responder confirms that the connection is dead. All of them end with ErrBroken, as on a
// real fabric.
func (p *Port) Flaky(seed uint64, oneIn int) {
	for i := range p.targets {
		p.targets[i].Conn = &flaky{Conn: p.targets[i].Conn, rng: rand.New(rand.NewPCG(seed, uint64(i))), oneIn: oneIn}
	}
}

type flaky struct {
	rdma.Conn
	rng   *rand.Rand
	oneIn int
	fate  []fate // of the chains posted, in order
	dead  bool
	late  []*rdma.Chain
}

type fate uint8

const (
	runs fate = iota
	dropped
	answerLost
	runsLate
)

func (f *flaky) Post(c *rdma.Chain) {
	to := runs
	switch {
	case f.dead:
		to = dropped
	case f.rng.IntN(f.oneIn) == 0:
		to = fate(1 + f.rng.IntN(3))
		f.dead = true
	}
	f.fate = append(f.fate, to)
	switch to {
	case runs, answerLost:
		f.Conn.Post(c)
	case runsLate:
		// Copied, because the caller uses the chain's storage again.
		l := &rdma.Chain{To: c.To, Verbs: append([]rdma.Verb{}, c.Verbs...)}
		for i := range l.Verbs {
			l.Verbs[i].Buf = append([]byte{}, l.Verbs[i].Buf...)
		}
		f.late = append(f.late, l)
	}
}

func (f *flaky) Wait(c *rdma.Chain, deadline int64) {
	to := f.fate[0]
	f.fate = f.fate[1:]
	if to == runs || to == answerLost {
		f.Conn.Wait(c, deadline)
	}
	if to == runs {
		return
	}
	c.Err, c.Done = fmt.Errorf("%w: on purpose", rdma.ErrBroken), 0
	for i := range c.Verbs {
		v := &c.Verbs[i]
		v.Old = 0xdead
		if v.Op == rdma.Read {
			for j := range v.Buf {
				v.Buf[j] = 0xdd
			}
		}
	}
}

func (f *flaky) Reset(ctx context.Context) error {
	for _, c := range f.late {
		f.Conn.Post(c)
		f.Conn.Wait(c, 0)
	}
	f.late, f.dead = nil, false
	return f.Conn.Reset(ctx)
}
