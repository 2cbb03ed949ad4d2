package client

import (
	"errors"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
)

// Answers. All but ErrUnknown mean: not done, and never will be.
var (
	ErrFreed     = slab.ErrFreed
	ErrBadRef    = slab.ErrBadRef
	ErrImmutable = slab.ErrImmutable
	ErrBusy      = slab.ErrBusy
	ErrCorrupt   = slab.ErrCorrupt
	ErrConflict  = slab.ErrConflict
	ErrTooLarge  = slab.ErrTooLarge
	ErrLease     = slab.ErrLease
	ErrNoRegion  = slab.ErrNoRegion
	ErrNoSpace   = alloc.ErrNoSpace
	// ErrArgument: the call asks for what there cannot be.
	ErrArgument = errors.New("invalid argument")
	// ErrUnknown: may have been done, at most once. Read to find out.
	ErrUnknown = slab.ErrUnknown
	// ErrFenced: the session was ended; the Client opens a new one by itself.
	ErrFenced = errors.New("session has been fenced")
	// ErrClosed: the Client has been closed.
	ErrClosed = errors.New("client is closed")
	// ErrUnreachable: no controller, or no way to a node's memory.
	ErrUnreachable = errors.New("unreachable")
	// ErrNoName, ErrNameExists: the placement library has no such name, or has it already.
	ErrNoName     = errors.New("no such name")
	ErrNameExists = errors.New("name exists")
)
