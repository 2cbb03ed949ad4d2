package clientsim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// worker is a client process with several goroutines that share a Client and a Tree.
// When it is killed another takes its place.
type worker struct {
	c  *Cluster
	r  *run
	id int

	mu           sync.Mutex     // guards the fields below
	incarnations int            // processes begun
	p            *Proc          // the present process
	cl           *client.Client // its client; nil until it is connected
	tree         *kv.Tree
	ready        chan struct{} // closed when cl is there
	first        uint32        // session of cl when it connected

	leaving *client.Client // that is being closed: calls may still begin at it
}

// incarnation is one process of a worker, from its start to its end.
type incarnation struct {
	p    *Proc
	cl   *client.Client // nil until it is connected
	tree *kv.Tree       // with Options.Tree
	name string         // in the log
}

// now is the present incarnation; without a client while there is none.
func (w *worker) now() *incarnation {
	w.mu.Lock()
	defer w.mu.Unlock()
	return &incarnation{p: w.p, cl: w.cl}
}

// connect begins an incarnation.
func (w *worker) connect(ctx context.Context) {
	w.mu.Lock()
	w.incarnations++
	name := fmt.Sprintf("client%d.%d", w.id, w.incarnations)
	w.mu.Unlock()
	for ctx.Err() == nil {
		cctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		p, cl, err := w.c.Client(cctx, name, client.Config{Lanes: w.c.opt.Lanes, Replicas: w.c.opt.replicas(), Slab: w.c.opt.slab(), ReadFrom: w.c.opt.readFrom(), HelpFromNodes: w.c.opt.Help && w.id != 1})
		cancel()
		if err != nil {
			_ = w.c.pause(ctx, 100*time.Millisecond)
			continue
		}
		var tree *kv.Tree
		for w.c.opt.Tree && tree == nil && ctx.Err() == nil {
			tctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			if tree, err = kv.Open(tctx, cl, treeName, btree.Config{}); err != nil {
				_ = w.c.pause(ctx, 100*time.Millisecond)
			}
			cancel()
		}
		w.mu.Lock()
		w.p, w.cl, w.tree, w.first = p, cl, tree, cl.SessionID()
		close(w.ready)
		w.mu.Unlock()
		return
	}
}

// incarnation is the present one; false when the schedule is over.
func (w *worker) incarnation(ctx context.Context) (*incarnation, bool) {
	for {
		w.mu.Lock()
		ready := w.ready
		l := &incarnation{w.p, w.cl, w.tree, fmt.Sprintf("client%d.%d", w.id, w.incarnations)}
		w.mu.Unlock()
		select {
		case <-ready:
			if ctx.Err() != nil {
				return nil, false
			}
			if l.cl != nil {
				return l, true
			}
		case <-ctx.Done():
			return nil, false
		}
	}
}

// kill kills the process and starts the next.
func (w *worker) kill() {
	l := w.now()
	if l.cl == nil || !w.forget(l.cl) {
		return
	}
	w.c.count(&w.c.Counts.ClientKills)
	w.r.hurtSessions()
	l.p.Kill()
	w.r.background.Go(func() { l.cl.Close() })
	w.r.background.Go(func() { w.connect(w.r.ctx) })
}

// leave closes the client while calls run, and connects another: Close waits for the calls
// for some time, and ends the session otherwise than in good order if one does not end. For
// some time calls still begin at the client; behind Close they must post nothing.
func (w *worker) leave() {
	l := w.now()
	w.mu.Lock()
	if l.cl == nil || w.leaving == l.cl {
		w.mu.Unlock()
		return
	}
	w.leaving = l.cl
	w.mu.Unlock()
	w.c.count(&w.c.Counts.Leaves)
	d := w.r.fate.span(2 * time.Second)
	forgotten := make(chan bool, 1)
	w.r.background.Go(func() {
		_ = w.r.pause(w.r.ctx, d)
		forgotten <- w.forget(l.cl)
	})
	w.r.background.Go(func() {
		if err := l.cl.Close(); err != nil {
			w.r.hurtSessions()
			w.c.log.Debug("leave", "who", l.p.Name, "error", err)
		}
		if <-forgotten { // else it was killed, and another has been connected
			w.connect(w.r.ctx)
		}
	})
}

// forget ends the present incarnation if it is that of cl; false if it has ended before.
func (w *worker) forget(cl *client.Client) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cl != cl {
		return false
	}
	w.p, w.cl, w.tree, w.ready = nil, nil, nil, make(chan struct{})
	return true
}

// payload of a value: the number all over, so that one can tell whether it is whole.
func payload(v uint64, size int) []byte {
	b := make([]byte, 16+size)
	binary.LittleEndian.PutUint64(b, v)
	binary.LittleEndian.PutUint64(b[8:], uint64(size))
	for i := range size / 8 {
		binary.LittleEndian.PutUint64(b[16+8*i:], v*0x9e3779b97f4a7c15+uint64(i))
	}
	return b
}

// valueOf is the number of a payload; false if it is not one.
func valueOf(b []byte) (uint64, bool) {
	if len(b) < 16 {
		return 0, false
	}
	v, size := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
	return v, size == uint64(len(b)-16) && equal(b, payload(v, int(size)))
}

// outcome of a change by its error.
func outcome(err error) (r result, recorded bool) {
	switch {
	case err == nil:
		return done, true
	case errors.Is(err, client.ErrUnknown):
		return unknown, true
	case errors.Is(err, client.ErrFreed), errors.Is(err, btree.ErrNoKey):
		return none, true
	case errors.Is(err, btree.ErrKeyExists):
		return exists, true
	}
	return none, false // not done, and never will be
}

// call runs one operation with a deadline, and checks that it keeps it.
func (w *worker) call(ctx context.Context, l *incarnation, what string, f func(ctx context.Context) error) error {
	c := w.c
	limit := client.DefaultTimeout
	if c.opt.Deadline && c.chance(3) {
		// As likely within a round trip as within a large write.
		limit = c.between(50*time.Microsecond, 200*time.Microsecond) << c.intn(13)
	}
	if c.opt.Spare {
		limit = spareLimit
	}
	if !c.opt.Deadline {
		ctx = c.ctx // the end of the schedule is no deadline either
	}
	cctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c.count(&c.Counts.Operations)
	began := time.Now()
	err := f(cctx)
	if took := time.Since(began); took > limit+callSlack+w.r.slept(began) {
		c.fail("%s: %s took %v, its deadline was %v: %v", l.name, what, took, limit, err)
	}
	if err != nil {
		c.log.Debug(what, "who", l.name, "took", time.Since(began), "error", err)
	}
	switch {
	case errors.Is(err, client.ErrUnknown):
		c.count(&c.Counts.Unknown)
	case err != nil:
		c.count(&c.Counts.Failed)
	}
	if isWrong(err) {
		c.fail("%s: %s: %v", l.name, what, err)
	}
	return err
}

// isWrong: nothing that befalls a cluster explains the error.
func isWrong(err error) bool {
	for _, wrong := range []error{client.ErrCorrupt, btree.ErrCorrupt, client.ErrKey, client.ErrNotEncrypted, client.ErrNotAuthentic} {
		if errors.Is(err, wrong) {
			return true
		}
	}
	return false
}

// spareLimit is the deadline of calls whose sessions must last. A call whose time is up ends its session if it cannot release its slab within settleTime, and a
// node that stops just then is found lost later than that. So these calls have time for two callbacks and a failover beside each.
const spareLimit = 2 * (longestCallback + failoverBound)

// callSlack is what a call may take beyond its deadline: cleanup has time of its own.
const callSlack = 6 * time.Second
