package slab

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// VersionOff is where the word V of an object lies in its region. That stays so for as long as the object lives: the class and
// the kind of a block do not change before all of its slabs are free and it has been reclaimed.
//
// Errors: ErrFreed, ErrBadRef, ErrCorrupt, ErrLease, ErrBusy, and those of the port.
func (l *Lane) VersionOff(ref proto.Ref) (uint64, error) {
	for restarts := 1; ; restarts++ {
		var o object
		switch err := l.resolve(&o, ref); {
		case err == nil:
			return o.slab.VOff(), nil
		case !errors.Is(err, errAgain):
			return 0, err
		case restarts > maxRestarts:
			return 0, fmt.Errorf("%w: the table kept changing", ErrBusy)
		}
		if err := l.port.Pause(restarts); err != nil {
			return 0, err
		}
	}
}
