package cxl

import (
	"context"
	"errors"
)

// QuickLitmus has hosts join after a litmus of one short program.
func QuickLitmus() {
	p := programs[0]
	p.enough = 1
	replaced.Store(&[]program{p})
}

// Before has f called before each look at the board. false: the agent ends without a word.
func (a *Agent) Before(f func() bool) { a.before = f }

// During has f called in each command.
func (a *Agent) During(f func()) { a.during = f }

// Die ends what an agent has, as the kernel does when its process dies with its clients.
// Preconditions: Serve has ended because f of Before said so.
func (a *Agent) Die() error {
	return errors.Join(a.stop(context.Background()), a.whole.Close(), a.area.Unmap(), unlock(a.dev))
}

// FailingLitmus has hosts that join find what must not be, until the function that it returns is called.
func FailingLitmus() (end func()) {
	had := replaced.Load()
	p := programs[0]
	p.enough, p.check = 1, func(s *side) { s.bad = 1 }
	replaced.Store(&[]program{p})
	return func() { replaced.Store(had) }
}

// Die ends a home without a word, as the end of its process does.
func (h *Home) Die() error {
	h.cancel()
	h.done.Wait()
	return h.area.Unmap()
}
