package sim

import (
	"fmt"
	"iter"
	"runtime/debug"
)

// proc is a coroutine: it runs a body until the body waits. It outlives the
// schedules of a world, because making one costs more than a schedule's step.
type proc struct {
	w     *world
	id    int
	body  func()
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool

	state  procState
	wake   int64 // sleeping until then
	waits  int   // for so many chains
	frozen int64 // paused by a fault until then
	killed bool
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
			if p.body != nil && !p.killed { // it may be killed before it has begun
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

// start gives an idle proc a body.
func (p *proc) start(body func()) {
	p.body, p.killed, p.frozen, p.waits = body, false, 0, 0
	p.state = procReady
	p.w.setReady(p, true)
}

// resume lets it move until it waits.
func (p *proc) resume() { p.next() }

// kill unwinds the body.
func (p *proc) kill() {
	if p.state == procIdle {
		return
	}
	p.killed = true
	p.next()
}

// block waits until somebody makes the proc ready.
func (p *proc) block() {
	p.yield(struct{}{})
	if p.killed {
		panic(killedError{})
	}
}

// sleep lets virtual time pass.
func (p *proc) sleep(d int64) {
	p.state, p.wake = procSleeping, p.w.now+max(d, 1)
	p.w.setReady(p, false)
	p.w.at(p.wake)
	p.block()
}

// await waits for the answers of so many chains, no longer than until.
func (p *proc) await(until int64) {
	for p.waits > 0 && p.w.now < until {
		p.state, p.wake = procWaiting, until
		p.w.setReady(p, false)
		p.w.at(until)
		p.block()
	}
}

// answered is called for each chain that got its outcome.
func (p *proc) answered() {
	if p.waits--; p.waits == 0 && p.state == procWaiting {
		p.ready()
	}
}

func (p *proc) ready() {
	p.state = procReady
	p.w.setReady(p, true)
}

// tick wakes a proc whose time has come, and says when to look again.
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
