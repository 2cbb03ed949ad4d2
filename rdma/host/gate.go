package host

import (
	"context"
	"fmt"
	"runtime"
	"structs"
	"sync/atomic"
	"time"
)

// This file has the gate page of a lane, by which access is taken away from a lane that may be in
// another process; see The gate in the package comment.

// MaxWindows is the number of windows a lane can have open: 8 TiB of 2 GiB regions.
const MaxWindows = 4096

// PageBytes is the size of a lane's gate page: three cache lines and the keys.
// It is sparse, on shm a memfd of its own.
const PageBytes = 192 + 8*MaxWindows

// page is what a lane and its responder share. Part of the shm protocol.
//
//	  0  shut     0, or why the gate was shut                 responder, and the client when it closes
//	 64  busy     odd while a chain runs; counts up            lane
//	 72  verbs  80 bytes read  88 bytes written  96 refusals  104 offences
//	112  bytes verified                                       lane, statistics
//	192  keys     one word for each window, 0 = not valid      responder
type page struct {
	_        structs.HostLayout
	shut     uint64 // not 0: no chain that starts from now on executes; revoked is final
	_        [56]byte
	busy     uint64 // Invariant: only ever rises by one, written by the lane alone.
	verbs    uint64 // executed
	read     uint64 // bytes that READs returned
	written  uint64 // bytes that WRITEs stored
	refused  uint64 // refusals of chains, and offences of Open
	offence  uint64 // refusals that a correct client does not cause
	verified uint64 // bytes that VERIFYs hashed
	_        [8]byte
	_        [64]byte           // the line that the adjacent-line prefetcher would drag along
	keys     [MaxWindows]uint64 // valid key of each slot; a chain whose key differs does not execute
}

// Why a gate was shut.
const (
	open       = 0
	revoked    = 1 // the session was fenced
	superseded = 2 // the lane was dialled again
	closed     = 3 // by the client
	gone       = 4 // the node stops, or the client's connection to it has ended
)

// shutGate ends all of a lane's access: no chain that begins afterwards executes. The reason
// revoked replaces any other and is never replaced.
func (p *page) shutGate(why uint64) {
	if why == revoked {
		atomic.StoreUint64(&p.shut, revoked)
		return
	}
	atomic.CompareAndSwapUint64(&p.shut, open, why)
}

// awaitIdle returns when no chain runs that was running when it was called.
func (p *page) awaitIdle() {
	for w := (wait{}); ; w.pause() {
		if p.idleSince(&w) {
			return
		}
	}
}

// wait is one lane's part in waiting for many.
type wait struct {
	seen  uint64 // page.busy when the waiting began, odd
	began bool   // seen is set
	naps  int    // pauses so far; each is longer, up to 1 ms
}

// idleSince says whether the lane has been outside of a chain at some moment since the wait
// began. busy is odd while a chain runs, so that another value than the first one shows that this
// chain has ended.
func (p *page) idleSince(w *wait) bool {
	now := atomic.LoadUint64(&p.busy)
	if now&1 == 0 {
		return true
	}
	if !w.began {
		w.began, w.seen = true, now
		return false
	}
	return now != w.seen
}

// pause sleeps, longer with each call: a chain takes a microsecond, or a hundred for a megabyte.
func (w *wait) pause() {
	w.naps++
	time.Sleep(min(time.Duration(w.naps)*5*time.Microsecond, time.Millisecond))
}

// drain is drainChains for chains and procedures.
func drain(ctx context.Context, lanes []*Lane, killAfter time.Duration) error {
	if err := drainChains(ctx, lanes, killAfter); err != nil {
		return err
	}
	for _, l := range lanes {
		if err := l.messages.drain(ctx); err != nil {
			return fmt.Errorf("lane %d of session %d: %w", l.number, l.session.ticket.Session, err)
		}
	}
	return nil
}

// drainChains waits for the chains of lanes that were running when it was called. nil: none of them
// runs any more, so that nothing executes under a key that was cleared before. A shm client that
// stays busy for longer than killAfter is killed, and its death is waited for. If ctx ends first
// drainChains returns an error, and the caller has to call again.
func drainChains(ctx context.Context, lanes []*Lane, killAfter time.Duration) error {
	start := time.Now()
	for _, l := range lanes {
		w := wait{}
		for !l.page.idleSince(&w) {
			if l.process != nil {
				if l.process.Dead() {
					break
				}
				if time.Since(start) > killAfter && !l.process.Own() {
					if err := l.access.kill(l.process, "stays inside a chain, and its access has ended"); err != nil {
						return err
					}
				}
			}
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("lane %d of session %d is still executing: %w", l.number, l.session.ticket.Session, err)
			}
			w.pause()
		}
	}
	runtime.KeepAlive(lanes) // and with them their pages
	return nil
}
