package alloc

import "github.com/quarrystore/quarry/internal/slab"

// Epochs is what a program that reclaims sees of the sessions' acknowledgements. Its
// own session acknowledges a reclaim epoch when nothing that it began before is under way.
type Epochs interface {
	// Raise raises the reclaim epoch.
	Raise() (epoch uint64, err error)
	// Passed says whether every other session has acknowledged an epoch or is fenced.
	// It waits a little where not.
	Passed(epoch uint64) (bool, error)
	// Hold keeps the session from acknowledging anything later than epoch. False: it has already.
	Hold(epoch uint64) bool
	// Free lets it acknowledge whatever it hears of.
	Free()
}

// Turn waits until no other reclaim is under way anywhere: until whatever was begun
// before an epoch that is raised here has finished or is fenced. What a reclaim posts
// late must not meet the next one: a CAS to RECLAIM would skip its passes.
//
// Invariant: between Turn and Free the session acknowledges no later epoch, so that
// all others that wait for their turn go on waiting, and those in the middle of
// theirs are none: two can not wait for each other's pass. Of two that wait for their
// turn the one that has acknowledged the other's epoch raises another.
func Turn(e Epochs) error {
	if slab.Broken(slab.BugReclaimNoTurn) {
		return nil
	}
	for {
		e.Free()
		epoch, err := e.Raise()
		if err != nil {
			return err
		}
		for passed := false; !passed; {
			if passed, err = e.Passed(epoch); err != nil {
				return err
			}
			if !passed {
				e.Free()
			}
		}
		if e.Hold(epoch) {
			return nil
		}
	}
}

// Pass waits for a pass in the middle of a turn.
func Pass(e Epochs) error {
	epoch, err := e.Raise()
	for passed := false; err == nil && !passed; {
		passed, err = e.Passed(epoch)
	}
	return err
}
