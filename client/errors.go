package client

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/slab"
)

// Errors of calls, for errors.Is. Every error that does not wrap ErrUnknown means that the
// operation was not done and never will be.
var (
	// ErrUnknown: the operation was done once or not at all. Read the object to find out.
	ErrUnknown = slab.ErrUnknown

	// ErrFreed: the object has been freed.
	ErrFreed = slab.ErrFreed
	// ErrBadRef: the Ref does not name an object of this cluster.
	ErrBadRef = slab.ErrBadRef
	// ErrNoRegion: the distribution table has no region with the number in the Ref.
	ErrNoRegion = slab.ErrNoRegion
	// ErrTenant: the Ref names an object of another tenant.
	ErrTenant = errors.New("the object belongs to another tenant")
	// ErrImmutable: the object was allocated with AllocOptions.WriteOnce. From Restore: it was a chunk of a large object.
	ErrImmutable = slab.ErrImmutable
	// ErrConflict: the object or name is not at the version that the caller named.
	ErrConflict = slab.ErrConflict
	// ErrBusy: other writers changed or held the object during every attempt. Retry later.
	ErrBusy = slab.ErrBusy
	// ErrHoldLost: a reservation of a Held has ended with its region's epoch or with the session. From Release: another client may have
	// changed objects of the set while it was held.
	ErrHoldLost = slab.ErrHoldLost
	// ErrCorrupt: no replica of the object has an image with a valid checksum.
	ErrCorrupt = slab.ErrCorrupt
	// ErrBad: the object is lost, and its slab is marked BAD. It is an ErrCorrupt. Restore restores the object, and FreeBad gives it up.
	ErrBad = slab.ErrBad
	// ErrWhole: MarkBad has left the object alone, because a replica has a whole image of it.
	ErrWhole = slab.ErrWhole
	// ErrKey: the object is encrypted with a key that Config.Keys has not given.
	ErrKey = slab.ErrKey
	// ErrNotEncrypted: the object is not encrypted, and Config.Keys is set without AllowClear.
	ErrNotEncrypted = slab.ErrNotEncrypted
	// ErrNotAuthentic: the object is encrypted, and was not written there by a holder of the key.
	ErrNotAuthentic = slab.ErrNotAuthentic
	// ErrTooLarge: the payload exceeds MaxObjectBytes, or the capacity that the object was
	// allocated with.
	ErrTooLarge = slab.ErrTooLarge
	// ErrNoSpace: no region has a free slab of the size, and the cluster refused to make
	// another region for want of memory or storage nodes.
	ErrNoSpace = alloc.ErrNoSpace

	// ErrArgument: an argument is outside its documented range.
	ErrArgument = errors.New("invalid argument")
	// ErrBadName: the string cannot be a name. It is also an ErrArgument.
	ErrBadName = fmt.Errorf("%w: bad name", ErrArgument)
	// ErrReadOnly: the call changes memory, and Config.ReadOnly is set.
	ErrReadOnly = errors.New("client is read-only")
	// ErrNoName: the placement library has no such name.
	ErrNoName = errors.New("no such name")
	// ErrNameExists: the placement library has the name already.
	ErrNameExists = errors.New("name exists")

	// ErrNoFunction: no worker beside the node of the object's primary calls the function.
	ErrNoFunction = errors.New("no such function")
	// ErrFunction: the function has returned an error, or has taken longer than it may. The object is as it was.
	ErrFunction = errors.New("the function has failed")
	// ErrTooManyWatched: the Client's Watchers have MaxWatched objects.
	ErrTooManyWatched = errors.New("too many watched objects")

	// ErrUnreachable: no controller answered, or no node that holds the object's region
	// answered. The call fails as soon as the distribution table says so.
	ErrUnreachable = errors.New("unreachable")
	// ErrLease: the session's lease ran out before the answer could be returned. Retry.
	ErrLease = slab.ErrLease
	// ErrFenced: the session has ended. The Client opens another for later calls.
	ErrFenced = errors.New("session has been fenced")
	// ErrClosed: Close has been called.
	ErrClosed = errors.New("client is closed")
)
