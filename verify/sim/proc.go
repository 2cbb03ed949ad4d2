package sim

import (
	"fmt"
	"iter"
	"runtime/debug"
)

// proc is a coroutine that runs a body until the body waits. A world reuses its procs for all
// schedules, because making one costs more than a step of a schedule.
type proc struct {
	w     *world                  // the world that steps it
	id    int                     // its place in world.procs
	body  func()                  // what it runs now
	next  func() (struct{}, bool) // runs the coroutine until it yields
	stop  func()                  // ends the coroutine
	yield func(struct{}) bool     // called by the body, to wait

	state  procState // whether it can run
	wake   int64     // sleeping until then
	waits  int       // chains that it waits for
	frozen int64     // paused by a fault until then
	killed bool      // the body ends at its next wait
}

type procState uint8

const (
	procIdle procState = iota // has no body
	procReady
	procSleeping
	procWaiting
)

// killedError unwinds a body whose process has been killed.
type killedError struct{}

func (p *proc) init(w *world, id int) {
	p.w, p.id = w, id
	p.next, p.stop = iter.Pull(func(yield func(struct{}) bool) {
		p.yield = yield
		for {
			if p.body != nil && !p.killed { // not if it was killed before it began
				p.runBody()
			}
			p.body, p.state = nil, procIdle
			p.w.setReady(p, false)
			if !yield(struct{}{}) {
				return
			}
		}
	})
}

func (p *proc) runBody() {
	defer func() {
		switch e := recover().(type) {
		case nil, killedError:
		default:
			p.w.fail("panic", fmt.Sprintf("%v\n%s", e, debug.Stack()))
		}
	}()
	p.body()
}

// start starts a body in an idle proc.
func (p *proc) start(body func()) {
	p.body, p.killed, p.frozen, p.waits = body, false, 0, 0
	p.state = procReady
	p.w.setReady(p, true)
}

// resume runs it until it waits.
func (p *proc) resume() { p.next() }

// kill ends the body by a panic.
func (p *proc) kill() {
	if p.state == procIdle {
		return
	}
	p.killed = true
	p.next()
}

// block waits until the proc is made ready.
func (p *proc) block() {
	p.yield(struct{}{})
	if p.killed {
		panic(killedError{})
	}
}

// sleep waits for a virtual time.
func (p *proc) sleep(d int64) {
	p.state, p.wake = procSleeping, p.w.now+max(d, 1)
	p.w.setReady(p, false)
	p.w.at(p.wake)
	p.block()
}

// await waits for the outcomes of the chains in waits, at most until the given time.
func (p *proc) await(until int64) {
	for p.waits > 0 && p.w.now < until {
		p.state, p.wake = procWaiting, until
		p.w.setReady(p, false)
		p.w.at(until)
		p.block()
	}
}

// answered is called for each chain that has an outcome.
func (p *proc) answered() {
	if p.waits--; p.waits == 0 && p.state == procWaiting {
		p.ready()
	}
}

func (p *proc) ready() {
	p.state = procReady
	p.w.setReady(p, true)
}

// tick wakes a proc that is due, and asks for a timer if it is not.
func (p *proc) tick() {
	if p.frozen > 0 {
		if p.w.now < p.frozen {
			p.w.at(p.frozen)
			return
		}
		p.frozen = 0
		p.w.setReady(p, p.state == procReady)
	}
	if p.state == procSleeping || p.state == procWaiting {
		if p.w.now >= p.wake {
			p.ready()
		} else {
			p.w.at(p.wake)
		}
	}
}

// freeze pauses the process.
func (p *proc) freeze(until int64) {
	p.frozen = max(p.frozen, until)
	p.w.setReady(p, false)
	p.w.at(p.frozen)
}
