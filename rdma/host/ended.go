package host

// Ended knows which sessions are never admitted again, by serial, in bounded memory: those that
// were fenced one by one, and all below the serial given to EndBelow that it did not list as
// live. The caller locks. The zero Ended admits all.
type Ended struct {
	fenced map[uint64]struct{} // serials that Fence named, those below floor removed again
	floor  uint64              // serials below it are over unless they are in live; never falls
	live   map[uint64]struct{} // below floor, and admitted
}

// Admits says whether a session has not ended.
func (e *Ended) Admits(serial uint64) bool {
	if serial < e.floor {
		_, ok := e.live[serial]
		return ok
	}
	_, ended := e.fenced[serial]
	return !ended
}

// Fence ends a session; false if it had ended before.
func (e *Ended) Fence(serial uint64) bool {
	if !e.Admits(serial) {
		return false
	}
	if serial < e.floor {
		delete(e.live, serial)
		return true
	}
	if e.fenced == nil {
		e.fenced = make(map[uint64]struct{})
	}
	e.fenced[serial] = struct{}{}
	return true
}

// EndBelow ends every session below next that is not in live. A list older than the
// last one says nothing, and none brings back what has ended.
func (e *Ended) EndBelow(next uint64, live []uint64) {
	if next < e.floor {
		return
	}
	keep := make(map[uint64]struct{}, len(live))
	for _, serial := range live {
		if serial < next && e.Admits(serial) {
			keep[serial] = struct{}{}
		}
	}
	e.floor, e.live = next, keep
	for serial := range e.fenced {
		if serial < e.floor {
			delete(e.fenced, serial)
		}
	}
}
