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
	o, err := l.object(ref)
	return o.slab.VOff(), err
}

// Room is the largest payload that the slab of an object has room for, whatever is in it now. Errors are those of VersionOff.
func (l *Lane) Room(ref proto.Ref) (int, error) {
	o, err := l.object(ref)
	return l.room(o.slab), err
}

// object finds the slab of a reference, under any table.
func (l *Lane) object(ref proto.Ref) (o object, err error) {
	for restarts := 1; ; restarts++ {
		switch err = l.resolve(&o, ref); {
		case err == nil, !errors.Is(err, errAgain):
			return o, err
		case restarts > maxRestarts:
			return o, fmt.Errorf("%w: the table kept changing", ErrBusy)
		}
		if err := l.port.Pause(restarts); err != nil {
			return o, err
		}
	}
}
