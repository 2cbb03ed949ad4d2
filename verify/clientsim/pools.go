package clientsim

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

// This file has clients take turns as owners of a pool. An owner restores its memory, persists ranges and closes the pool, or dies. Checked are, word for
// word: what was acknowledged is restored by the next owner; what an owner has restored stays, whichever replica is the primary later; and nothing that
// a former owner has begun is acknowledged, or found, beside that.

const (
	poolName  = "pool"
	poolSlots = 12
	slotWords = 60
	poolBytes = 2*spaceBytes + 8*slotWords // the slots lie over the border of the first two regions; the last region holds a few words
	slotsAt   = spaceBytes - 8*slotWords*poolSlots/2
)

// poolWork is what is known of the pool.
type poolWork struct {
	mu       sync.Mutex
	owners   int                 // how often the pool was opened
	restored map[int][]uint64    // words by owner, as it has restored them
	sure     [poolSlots]uint64   // value that the present owner has persisted; 0: as restored
	unsure   [poolSlots][]uint64 // values since, whose Persist has no sure answer
}

// makePool makes the pool, all zero.
func (r *run) makePool(ctx context.Context) error {
	r.pool.restored = map[int][]uint64{0: make([]uint64, poolSlots*slotWords)}
	p, cl, err := r.Client(ctx, "makes the pool", client.Config{Lanes: 1, Replicas: r.opt.replicas()})
	if err != nil {
		return err
	}
	defer p.cancel()
	x, err := pool.Create(ctx, cl, poolName, make([]byte, poolBytes), pool.Options{Replicas: r.opt.replicas(), RegionBytes: spaceBytes})
	if err == nil {
		_, err = x.Sync(ctx, nil)
	}
	if err == nil {
		err = x.Close(ctx)
	}
	return errors.Join(err, cl.Close())
}

// poolOp is one ownership of the pool.
func (r *run) poolOp(w *worker, l *incarnation) {
	local := make([]byte, poolBytes)
	var p *pool.Pool
	err := w.call(r.ctx, l, "open the pool", func(ctx context.Context) (err error) {
		p, err = pool.Open(ctx, l.cl, poolName, local, nil)
		return err
	})
	if err != nil {
		if errors.Is(err, pool.ErrNotPool) || errors.Is(err, pool.ErrMismatch) || errors.Is(err, pool.ErrUnfinished) || errors.Is(err, client.ErrNoName) {
			r.fail("%s: open the pool: %v", l.name, err)
		}
		return
	}
	r.count(&r.Counts.Owners)
	defer func() {
		_ = w.call(r.ctx, l, "close the pool", p.Close)
	}()
	err = w.call(r.ctx, l, "restore", func(ctx context.Context) error { _, err := p.Restore(ctx, nil); return err })
	if err != nil {
		return
	}
	me := r.took(l, p, local)
	for range r.intn(20) {
		if slot := r.intn(poolSlots); r.chance(4) {
			r.readSlot(w, l, p, me, slot)
		} else {
			r.persist(w, l, p, me, local, slot)
		}
		if r.pause(r.ctx, r.rest()) != nil {
			return
		}
	}
}

// slotOf is the memory of a slot.
func slotOf(local []byte, slot int) []byte { return local[slotsAt+8*slotWords*slot:][:8*slotWords] }

// took notes the next owner, and compares what it has restored with what is known. It returns the owner's number.
func (r *run) took(l *incarnation, p *pool.Pool, local []byte) int {
	x := &r.pool
	x.mu.Lock()
	defer x.mu.Unlock()
	before := x.restored[x.owners]
	x.owners++
	now := make([]uint64, poolSlots*slotWords)
	for i := range now {
		now[i] = binary.LittleEndian.Uint64(local[slotsAt+8*i:])
		x.compare(r, l.name, i, now[i], before)
	}
	x.restored[x.owners] = now
	x.sure, x.unsure = [poolSlots]uint64{}, [poolSlots][]uint64{}
	if p.Dirty() {
		r.fail("%s: the pool is dirty behind a Restore", l.name)
	}
	return x.owners
}

// compare fails if a word is not what is known of it.
func (x *poolWork) compare(r *run, who string, word int, got uint64, restored []uint64) {
	slot := word / slotWords
	want := x.sure[slot]
	if want == 0 {
		want = restored[word]
	}
	if got != want && !slices.Contains(x.unsure[slot], got) {
		r.fail("%s: word %d of slot %d of the pool is %d: %d is acknowledged or restored, and %v may be there", who, word%slotWords, slot, got, want, x.unsure[slot])
	}
}

// persist changes a slot and persists it.
func (r *run) persist(w *worker, l *incarnation, p *pool.Pool, me int, local []byte, slot int) {
	x, v := &r.pool, r.h.value()
	b := slotOf(local, slot)
	for i := range slotWords {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
	x.mu.Lock()
	late := x.owners != me // the pool has another owner already
	if !late {
		x.unsure[slot] = append(x.unsure[slot], v)
	}
	x.mu.Unlock()
	err := w.call(r.ctx, l, "persist", func(context.Context) error { return p.Persist(uint64(slotsAt+8*slotWords*slot), 8*slotWords) })
	res, sent := outcome(err)
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case late && err == nil:
		r.fail("%s: %d in slot %d is acknowledged, and the pool has had another owner since before", l.name, v, slot)
	case late:
	case err == nil && x.owners != me:
		// Acknowledged late: it was there when the next owner restored the pool.
		if next := x.restored[me+1][slot*slotWords:][:slotWords]; slices.ContainsFunc(next, func(u uint64) bool { return u != v }) {
			r.fail("%s: %d in slot %d was acknowledged, and the next owner has not restored it", l.name, v, slot)
		}
	case err == nil && res == done:
		x.sure[slot], x.unsure[slot] = v, nil
	case !sent && x.owners == me:
		x.unsure[slot] = slices.DeleteFunc(x.unsure[slot], func(u uint64) bool { return u == v })
	}
}

// readSlot reads a slot. An owner that is none any more may read anything.
func (r *run) readSlot(w *worker, l *incarnation, p *pool.Pool, me, slot int) {
	b := make([]byte, 8*slotWords)
	if w.call(r.ctx, l, "read a slot", func(context.Context) error { return p.Read(b, uint64(slotsAt+8*slotWords*slot)) }) != nil {
		return
	}
	x := &r.pool
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := 0; i < slotWords && x.owners == me; i++ {
		x.compare(r, l.name, slot*slotWords+i, binary.LittleEndian.Uint64(b[8*i:]), x.restored[me])
	}
}

// checkPool is the last owner.
func (r *run) checkPool(ctx context.Context, cl *client.Client) {
	local := make([]byte, poolBytes)
	var p *pool.Pool
	err := r.again(ctx, func() (err error) {
		p, err = pool.Open(ctx, cl, poolName, local, nil)
		return err
	})
	if err == nil {
		_, err = p.Restore(ctx, nil)
	}
	if err != nil {
		r.fail("the pool at the end: %v", err)
		return
	}
	r.took(&incarnation{name: "last"}, p, local)
	rep, err := pool.Check(ctx, cl, poolName, local, nil)
	if err != nil || !rep.Same() {
		r.fail("the pool and its memory differ at the end: %+v, %v", rep, err)
	}
	if err := p.Close(ctx); err != nil {
		r.fail("close the pool at the end: %v", err)
	}
}
