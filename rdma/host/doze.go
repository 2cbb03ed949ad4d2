package host

import (
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/futex"
	"github.com/quarrystore/quarry/rdma/msg"
)

// This file has sleeps of the node in a thread. A client in another process of this host ends one by one system call, and the thread executes the
// request as soon as the kernel runs it. A message on the socket takes a turn of the network poller more, and wakes other threads of the Go
// scheduler, which look for work.

// longestDoze bounds a sleep in a thread. Behind it the lane sleeps without a thread, until the client's message on the socket.
const longestDoze = time.Second

// Doorbell is by what a provider wakes the goroutine that serves a lane's mailbox.
type Doorbell struct {
	bell  futex.Bell
	ended atomic.Bool
	rung  chan struct{} // of capacity 1
	over  chan struct{} // closed by End
	// longest is longestDoze.
	longest time.Duration
}

// NewDoorbell is for the goroutine of one lane.
func NewDoorbell() *Doorbell {
	return &Doorbell{rung: make(chan struct{}, 1), over: make(chan struct{}), longest: longestDoze}
}

// Ring has the goroutine look into the mailbox.
func (d *Doorbell) Ring() {
	select {
	case d.rung <- struct{}{}:
	default: // it has been woken, and has not looked yet
	}
	d.bell.Ring()
}

// End ends the goroutine. It is called once.
func (d *Doorbell) End() {
	d.ended.Store(true)
	close(d.over)
	d.bell.Ring()
}

// ServeMailbox serves the lane's mailbox until End, or until the lane's access ends: the error says why then. When nothing has come for
// quiet the node sleeps, in a thread for a while if there is one for it, else until Ring. It is for one goroutine.
func (l *Lane) ServeMailbox(quiet time.Duration, d *Doorbell) error {
	for {
		select {
		case <-d.rung:
		case <-d.over:
			return nil
		}
		for again := true; again && !d.ended.Load(); {
			var err error
			if again, err = l.serveAndDoze(quiet, d); err != nil {
				return err
			}
		}
	}
}

// serveAndDoze serves until nothing has come for quiet, and sleeps. again: in a thread, which was woken. Otherwise the client was told that the
// node sleeps until Ring.
func (l *Lane) serveAndDoze(quiet time.Duration, d *Doorbell) (again bool, err error) {
	if err := l.wake(); err != nil {
		return false, err
	}
	for {
		if err := l.serveUntilQuiet(quiet); err != nil {
			return false, err
		}
		seen := d.bell.Seen() // loaded before the client learns of the sleep: a Ring in between changes the word, and ends the sleep
		thread, ok := takeThread()
		if !ok {
			err := l.sleep(false)
			if err == errCame {
				continue
			}
			return false, err
		}
		err := l.sleep(true)
		woken := err == nil && l.doze(d, seen)
		thread.Give()
		switch {
		case err == errCame:
		case err != nil || woken:
			return true, err
		default:
			return l.moveSleep()
		}
	}
}

// takeThread is futex.Take on a kernel that has what doze needs.
func takeThread() (futex.Thread, bool) {
	if !futex.Supported() {
		return futex.Thread{}, false
	}
	return futex.Take()
}

// doze sleeps in a thread. false: the time is up. seen is of before the client was told of the sleep.
//
// No wake-up is lost. A client that has found the node asleep stores the number of the sleep in its word, and wakes the thread then. Either doze
// loads the number, or the kernel finds the word changed, or the thread sleeps when it is woken. A Ring and an End change the word of the
// Doorbell, which the kernel compares with seen.
func (l *Lane) doze(d *Doorbell, seen uint32) (woken bool) {
	for until := clock.In(d.longest); d.bell.Seen() == seen && !d.ended.Load(); {
		word, at, rung := l.rung()
		left := until - clock.Now()
		switch {
		case rung:
			return true
		case left <= 0:
			return false
		}
		d.bell.Wait(seen, at, word, time.Duration(left))
	}
	return true
}

// rung says what stands in the client's word, at which address, and whether that ends the sleep; so does the end of the lane's access.
//
// The memory may be unmapped when rung has returned: the address is for the kernel alone.
func (l *Lane) rung() (word uint32, at *uint32, ended bool) {
	m := &l.messages
	if m.enter() != nil {
		return 0, nil, true
	}
	defer m.leave()
	word, ended = m.box.server.Rung()
	return word, halfAt(m.box.memory.mem, msg.BellOff), ended
}

// moveSleep tells the client that no thread sleeps any more, and that the node sleeps until Ring. again: a request has come.
func (l *Lane) moveSleep() (again bool, err error) {
	if err := l.wake(); err != nil {
		return false, err
	}
	if err = l.sleep(false); err == errCame {
		return true, nil
	}
	return false, err
}

// WakeAt wakes the thread that sleeps on the word at off of a window.
func (r *Runner) WakeAt(slot int32, off uint64) {
	if at := r.wordOf(slot, off); at != nil {
		futex.Wake(at)
	}
}

// SleepAt sleeps while the low half of the word at off of a window is seen, until its node wakes this thread, but not longer than longest.
func (r *Runner) SleepAt(slot int32, off uint64, seen uint32, longest time.Duration) {
	if at := r.wordOf(slot, off); at != nil {
		futex.Wait(at, seen, longest)
	}
}

// wordOf is the address of a word of a window, for the kernel alone: the window may be unmapped at any time. nil: there is no such word.
func (r *Runner) wordOf(slot int32, off uint64) *uint32 {
	if uint(slot) >= uint(len(r.windows)) {
		return nil
	}
	mem := r.windows[slot].mem
	if off&7 != 0 || off >= uint64(len(mem)) {
		return nil
	}
	return halfAt(mem, off)
}
