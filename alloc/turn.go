package alloc

// Epochs is a session's access to reclaim epochs. A session acknowledges a reclaim epoch when no
// operation that it began before the epoch was raised is under way.
type Epochs interface {
	// Raise raises the reclaim epoch.
	Raise() (epoch uint64, err error)
	// Passed reports that every other session has acknowledged an epoch, or is fenced in the
	// region. If not, it waits a little and returns false.
	Passed(epoch uint64) (bool, error)
	// Hold keeps the session from acknowledging any epoch later than this one. false: it has
	// acknowledged a later one already.
	Hold(epoch uint64) bool
	// Free ends Hold: the session acknowledges every epoch again.
	Free()
}

// Turn serialises the reclaims of a region. It raises the reclaim epoch, and returns when every
// operation that began before has ended, or is fenced in the region. Without it, a late CAS to
// RECLAIM from an earlier reclaim could make the new one skip its grace periods.
//
// Invariant: from Turn to Free the session acknowledges no later epoch, so that Turn returns for
// no other session. Therefore at most one reclaim runs, and no two wait for each other's grace
// period. If two sessions are in Turn, the one that has acknowledged the other's epoch raises a
// new one.
func Turn(e Epochs) error {
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

// Pass waits for one grace period of a reclaim that has its turn: until every session has
// acknowledged a new epoch or is fenced.
func Pass(e Epochs) error {
	epoch, err := e.Raise()
	for passed := false; err == nil && !passed; {
		passed, err = e.Passed(epoch)
	}
	return err
}
