package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
)

// An object is lost when no replica has a whole image of it. Its slab can be marked BAD then (docs/DESIGN.md#objects-that-are-lost). A mark has a
// reference of its own: the address of the slab, with the version of the mark in the place of born. Marks are listed among the names.

// BadKind is the kind of the names that list marks. BadPrefix precedes the address.
const (
	BadKind   = "bad"
	BadPrefix = "bad/"
)

// badName is the name under which a mark is listed.
func badName(addr proto.Addr) string { return BadPrefix + addr.String() }

// MarkBad marks the slab at an address BAD if its object is lost, and lists the mark. It returns the reference of the mark, that of the present one
// if the slab is marked already. If the slab is marked and could not be listed, it returns both the reference and an error: ListBad
// lists it.
//
// Errors: ErrWhole if a replica has a whole image: Repair mends the others. ErrFreed if there is no object. ErrBusy while a replica is being
// rebuilt. ErrCorrupt if the replicas do not agree what is lost.
func (c *Client) MarkBad(ctx context.Context, addr proto.Addr) (mark Ref, err error) {
	err = c.onLane(ctx, KindUpdate, func(l *lane) error {
		mark, err = l.slab.MarkBad(addr)
		return err
	})
	if err != nil {
		return Ref{}, err
	}
	return mark, c.ListBad(ctx, mark)
}

// FreeBad gives up the object of a slab that is marked BAD: its references are those of a freed object from then on, and the slab is used again. mark is the
// reference of the mark; ErrFreed if the slab does not have it any more, ErrCorrupt if V of a replica is damaged, so that it cannot be known: fsck repairs that. Chunks of a large object stay, and fsck finds them.
func (c *Client) FreeBad(ctx context.Context, mark Ref) error {
	err := c.onLane(ctx, KindFree, func(l *lane) error {
		if err := l.alloc.FreeBad(mark); err != nil {
			return err
		}
		_ = l.alloc.Tidy() // map bits that cannot be cleared now are left to the scrub
		return nil
	})
	return c.unlisted(ctx, mark, err)
}

// Restore gives an object that is lost a payload again, from a copy that the caller has, and a tag. The object keeps its reference, ref. mark is the reference of the
// mark that its slab has; ErrFreed if the slab does not have it any more. The caller vouches that ref is of the object that was marked: the slab
// does not tell, and a reference of an object that was freed before would bring that one back. An object that is written once keeps that: the caller vouches for
// its payload too.
//
// A payload that does not fit into the slab is written to new chunks, and the slab gets their index: ErrTooLarge if that does not fit either, as in Write. Chunks that the object had
// before stay, and fsck finds them when no slab is marked any more.
//
// ErrCorrupt: V of a replica is damaged; nothing was done, and fsck repairs it. ErrImmutable: the slab had a chunk of a large object. Write that object anew, which gives it other chunks, and
// give the lost one up by FreeBad.
func (c *Client) Restore(ctx context.Context, mark, ref Ref, payload []byte, tag uint32) error {
	switch {
	case mark.Addr != ref.Addr || mark.Incarnation.Generation() != ref.Incarnation.Generation():
		return fmt.Errorf("%w: %v is not in the slab of the mark %v", ErrArgument, ref, mark)
	case tag > proto.MaxUserTag:
		return fmt.Errorf("%w: tag %d: want at most %d", ErrArgument, tag, proto.MaxUserTag)
	case len(payload) > MaxObjectBytes:
		return fmt.Errorf("%w: %d bytes, an object holds at most %d", ErrTooLarge, len(payload), MaxObjectBytes)
	}
	err := c.onLane(ctx, KindUpdate, func(l *lane) error { return l.restoreObject(mark, ref, payload, tag) })
	return c.unlisted(ctx, mark, err)
}

// restoreObject is Restore on a lane. A payload that does not fit into the slab is refused by the slab, when it is known to have the mark.
func (l *lane) restoreObject(mark, ref Ref, payload []byte, tag uint32) error {
	k := mark.Incarnation.Born()
	_, err := l.slab.Restore(ref, k, payload, tag)
	if !errors.Is(err, ErrTooLarge) {
		return err
	}
	reg, err := l.Region(ref.Addr.Region())
	if err != nil {
		return err
	}
	room, err := l.slab.Room(ref)
	if err != nil {
		return err
	}
	if need := indexRoom(len(payload), l.chunkBytes()); need > room {
		return fmt.Errorf("%w: %d bytes need an index of %d, this slab has room for %d", ErrTooLarge, len(payload), need, room)
	}
	x, err := l.writeChunks(payload, alloc.Home{Replicas: reg.Replicas(), Durable: reg.Durable})
	if err != nil {
		return err
	}
	if _, err = l.slab.Restore(ref, k, x.encode(), tag|proto.TagIndex); err != nil && !errors.Is(err, ErrUnknown) {
		l.freeChunks(x.chunks)
	}
	return err
}

// ListBad lists a mark among the names, if neither it nor a later one of the slab is listed.
func (c *Client) ListBad(ctx context.Context, mark Ref) error {
	name := badName(mark.Addr)
	_, err := c.Names().Create(ctx, name, BadKind, mark)
	if !errors.Is(err, ErrNameExists) {
		return err
	}
	e, err := c.Names().Lookup(ctx, name)
	switch {
	case err != nil:
		return err
	case e.Kind != BadKind:
		return fmt.Errorf("%w: %q, of kind %q: the mark %v is not listed", ErrNameExists, name, e.Kind, mark)
	case e.Ref.Addr == mark.Addr && e.Ref.Incarnation >= mark.Incarnation: // by generation, then by version: a list of before is late
		return nil
	}
	_, err = c.Names().Swap(ctx, name, e.Revision, mark)
	return err
}

// unlisted takes a mark from the list that is not on its slab any more, and returns the error of the call that has found it so.
func (c *Client) unlisted(ctx context.Context, mark Ref, err error) error {
	if err != nil && !errors.Is(err, ErrFreed) {
		return err
	}
	e, lerr := c.Names().Lookup(ctx, badName(mark.Addr))
	if lerr == nil && e.Kind == BadKind && e.Ref == mark {
		lerr = c.Names().Delete(ctx, e.Name, e.Revision)
	}
	if err == nil && lerr != nil && !errors.Is(lerr, ErrNoName) && !errors.Is(lerr, ErrConflict) && !errors.Is(lerr, ErrBadName) {
		return fmt.Errorf("done, and the name %q stays: %w", badName(mark.Addr), lerr)
	}
	return err
}

// unlistPatience is how long UnlistBad waits for a region.
const unlistPatience = 5 * time.Second

// UnlistBad takes those marks from the list that are not on their slabs any more, or whose regions are gone, and returns their names. Names of marks that cannot be looked
// at stay, and err is of the first of them.
func (c *Client) UnlistBad(ctx context.Context) (gone []Name, err error) {
	skip := map[uint32]bool{} // regions that cannot be looked at
	lerr := c.Names().List(ctx, BadPrefix, BadKind, func(n Name) error {
		region := n.Ref.Addr.Region()
		if n.Name != badName(n.Ref.Addr) || skip[region] {
			return nil // a name that a user has given
		}
		has := false
		lctx, cancel := context.WithTimeout(ctx, unlistPatience)
		defer cancel()
		one := c.onLane(lctx, KindRead, func(l *lane) (err error) {
			has, err = l.slab.HasMark(n.Ref)
			return err
		})
		if errors.Is(one, ErrNoRegion) {
			one, has = nil, false
		}
		if one == nil && !has {
			if one = c.Names().Delete(ctx, n.Name, n.Revision); one == nil {
				gone = append(gone, n)
			}
			if errors.Is(one, ErrConflict) || errors.Is(one, ErrNoName) {
				one = nil // somebody else has seen to it
			}
		}
		if one != nil {
			skip[region] = skip[region] || !errors.Is(one, ErrCorrupt)
			err = errors.Join(err, fmt.Errorf("%q: %w", n.Name, one))
		}
		return ctx.Err()
	})
	return gone, errors.Join(err, lerr)
}
