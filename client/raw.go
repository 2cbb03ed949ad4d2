package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/raw"
)

// This file reaches raw regions, for package space.

const (
	// MaxRawBytes is how many bytes one ReadRaw or WriteRaw moves at most.
	MaxRawBytes = raw.MaxBatch
	// MaxRawPieces is how many pieces one ReadRaw or WriteRaw has at most.
	MaxRawPieces = raw.MaxPieces
)

// RawPiece is a range of the data of a raw region.
type RawPiece struct {
	Region uint32 // number in the table
	Off    uint64 // in bytes, from the first byte of data
	Buf    []byte
}

// RawRegion is a raw region as the Client's table has it.
type RawRegion struct {
	ID         uint32
	Space      string // that it is a part of
	Base       uint64 // virtual address of the space's first byte
	DataBytes  uint64 // of data, in each region of the space
	Index      uint32 // in the space, from 0
	Replicas   int    // that it should have
	Durable    bool   // writes survive a loss of power
	Node       uint32 // number of the node with its primary; 0: none
	Provider   string // that the Client reaches that node by; "" before the first verb
	Usable     bool   // it can be read and written now
	MemoryUsed uint64 // bytes of each replica
}

// RawRegions lists the raw regions of the Client's tenant, by space and index. With fresh it reads the table anew first.
func (c *Client) RawRegions(ctx context.Context, fresh bool) ([]RawRegion, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	if fresh {
		if err := s.refresh(ctx); err != nil {
			return nil, err
		}
	}
	var out []RawRegion
	for _, r := range s.view.Load().table.Regions() {
		p := r.Space
		if p == nil || r.Tenant != s.ticket.Tenant {
			continue
		}
		x := RawRegion{ID: r.Id, Space: p.Name, Base: p.Base, DataBytes: p.RegionBytes, Index: p.Index, Replicas: int(r.WantReplicas),
			Durable: durable(r), Usable: r.Usable(), MemoryUsed: r.SizeBytes}
		if len(r.Replicas) > 0 {
			x.Node = r.Replicas[0].Node
			if known, ok := c.providers.Load(nodeAdapter{x.Node, r.Replicas[0].Adapter}); ok {
				x.Provider = known.(nodeProvider).provider
			}
		}
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b RawRegion) int {
		return cmp.Or(cmp.Compare(a.Space, b.Space), cmp.Compare(a.Index, b.Index))
	})
	return out, nil
}

// MaxRawRegions is how many regions one CreateRaw makes at most.
const MaxRawRegions = 32

// CreateRaw makes count regions of a space, which is new unless grow is set. base 0 has the controllers choose. replicas 0 is the
// Config's, and then the cluster's default. It does not wait for another growth: ErrBusy.
//
// Errors: ErrNameExists, ErrNoName for spaces as for names; ErrNoSpace: no node has room, or another space has the addresses; ErrArgument.
// ErrUnknown: the regions may have been made.
func (c *Client) CreateRaw(ctx context.Context, at RawRegion, count int, grow bool) error {
	if c.cfg.ReadOnly {
		return ErrReadOnly
	}
	if err := c.allowClear(true); err != nil {
		return err
	}
	q := &quarrypb.CreateRegionRequest{Replicas: uint32(at.Replicas), Count: uint32(count), Grow: grow, Durability: quarrypb.Durability_DURABILITY_MEM,
		Space: &quarrypb.SpacePlace{Name: at.Space, Base: at.Base, RegionBytes: at.DataBytes}}
	if q.Replicas == 0 {
		q.Replicas = uint32(c.cfg.Replicas)
	}
	if at.Durable {
		q.Durability = quarrypb.Durability_DURABILITY_PMEM
	}
	_, err := requestOnceWithin(c.control, ctx, regionsTimeout, q, quarrypbconnect.ControllerClient.CreateRegion)
	if err != nil {
		return spaceError(at.Space, err)
	}
	c.expectTable(ctx)
	return nil
}

// DeleteRaw removes a space with all its regions. What they hold is gone. ErrNoName: there is none. ErrUnknown: some or all of its
// regions may have been removed.
func (c *Client) DeleteRaw(ctx context.Context, space string) error {
	if c.cfg.ReadOnly {
		return ErrReadOnly
	}
	q := &quarrypb.DeleteSpaceRequest{Name: space}
	res, err := requestOnceWithin(c.control, ctx, regionsTimeout, q, quarrypbconnect.ControllerClient.DeleteSpace)
	if err != nil {
		return spaceError(space, err)
	}
	for res.Regions > 0 {
		left := res.Regions
		select {
		case <-time.After(busyPause):
			res, err = request(c.control, ctx, q, quarrypbconnect.ControllerClient.DeleteSpace)
		case <-ctx.Done():
			err = ctx.Err()
		}
		if connect.CodeOf(err) == connect.CodeNotFound {
			break
		}
		if err != nil {
			return fmt.Errorf("%w: space %q: %d regions are still to be removed: delete it again: %w", ErrUnknown, space, left, err)
		}
	}
	c.expectTable(ctx)
	return nil
}

// expectTable reads the table anew behind a change of regions. An error does not matter: the change is done, and the table comes later.
func (c *Client) expectTable(ctx context.Context) { _, _ = c.RawRegions(ctx, true) }

// spaceError is the error of a controller's refusal of a request about a space.
func spaceError(space string, err error) error {
	var ce *connect.Error
	if errors.As(err, &ce) {
		for code, is := range map[connect.Code]error{
			connect.CodeNotFound: ErrNoName, connect.CodeAlreadyExists: ErrNameExists, connect.CodeAborted: ErrBusy, connect.CodeInvalidArgument: ErrArgument,
			connect.CodeResourceExhausted: ErrNoSpace, connect.CodeFailedPrecondition: ErrNoSpace,
		} {
			if ce.Code() == code {
				return fmt.Errorf("%w: %s", is, ce.Message())
			}
		}
	}
	return fmt.Errorf("space %q: %w", space, err)
}

// allowClear refuses plain bytes to a Client with keys: raw regions are not encrypted, and its caller expects that what it writes is. It may
// read them with Config.AllowClear.
func (c *Client) allowClear(changes bool) error {
	if c.cfg.Keys == nil || c.cfg.AllowClear && !changes {
		return nil
	}
	return fmt.Errorf("%w: spaces and pools hold plain bytes: write them with a client without keys, and read them without keys or with AllowClear", ErrNotEncrypted)
}

// onRaw runs a call at a place on a lane's raw programs.
func (c *Client) onRaw(ctx context.Context, k Kind, at rawPlace, f func(l *raw.Lane) error) error {
	if err := c.allowClear(k.changes()); err != nil {
		return err
	}
	return c.onLane(ctx, k, func(l *lane) (err error) {
		if l.raw == nil {
			if l.raw, err = raw.New(l.slab); err != nil {
				return err
			}
		}
		if !k.changes() {
			return rawError(f(l.raw))
		}
		if err := l.awaitPending(at); err != nil {
			return err
		}
		if err = f(l.raw); err != nil {
			l.notePending(at, err)
		}
		return rawError(err)
	})
}

// rawError makes errors of arguments ErrArgument.
func rawError(err error) error {
	if errors.Is(err, raw.ErrUnaligned) || errors.Is(err, raw.ErrOutside) || errors.Is(err, raw.ErrNotRaw) || errors.Is(err, raw.ErrLimit) {
		return fmt.Errorf("%w: %w", ErrArgument, err)
	}
	return err
}

// onPieces runs a call on pieces with offsets from the start of their regions.
func (c *Client) onPieces(ctx context.Context, k Kind, pieces []RawPiece, f func(l *raw.Lane, pieces []raw.Piece) error) error {
	if len(pieces) > MaxRawPieces {
		return fmt.Errorf("%w: %d pieces, at most %d", ErrArgument, len(pieces), MaxRawPieces)
	}
	return c.onRaw(ctx, k, rawPlace{pieces: pieces}, func(l *raw.Lane) error {
		moved := l.Pieces(len(pieces))
		for i, p := range pieces {
			moved[i] = raw.Piece{Region: p.Region, Off: rawOff(p.Off), Buf: p.Buf}
		}
		return f(l, moved)
	})
}

// rawOff is an offset from the start of a region. One that would wrap around is outside of every region.
func rawOff(off uint64) uint64 { return min(off, math.MaxUint64-proto.RawDataOff) + proto.RawDataOff }

// ReadRaw reads pieces, at most MaxRawPieces and MaxRawBytes together, in one round. While a client writes the same bytes, each byte is either
// the old or the new one.
func (c *Client) ReadRaw(ctx context.Context, pieces []RawPiece) error {
	return c.onPieces(ctx, KindRead, pieces, (*raw.Lane).Read)
}

// WriteRaw writes pieces, at most MaxRawPieces and MaxRawBytes together, to all replicas in one round. ErrUnknown: any of the bytes may have
// been written. ErrBusy: a change under a session of the Client that has ended may still arrive, and nothing was written.
func (c *Client) WriteRaw(ctx context.Context, pieces []RawPiece) error {
	return c.onPieces(ctx, KindUpdate, pieces, (*raw.Lane).Write)
}

// FlushRaw returns when a range of a durable region's data is on stable storage at every replica.
func (c *Client) FlushRaw(ctx context.Context, region uint32, off, bytes uint64) error {
	return c.onRaw(ctx, KindOther, rawPlace{region: region}, func(l *raw.Lane) error {
		return l.Flush(region, rawOff(off), bytes)
	})
}

// RawRange is a range of the data of a raw region.
type RawRange struct {
	Region uint32 // number in the table
	Off    uint64 // in bytes, from the first byte of data
	Bytes  uint64
}

// HashRaw stores the XXH3-64 of ranges, at most MaxRawBytes together, in one round. The nodes compute them where the
// transport allows it.
func (c *Client) HashRaw(ctx context.Context, ranges []RawRange, hashes []uint64) error {
	if len(hashes) < len(ranges) {
		return fmt.Errorf("%w: room for %d hashes of %d ranges", ErrArgument, len(hashes), len(ranges))
	}
	return c.onRaw(ctx, KindRead, rawPlace{}, func(l *raw.Lane) error { return l.Hashes(rawRanges(ranges), hashes) })
}

// CompareRaw is HashRaw, and stores of each range whether all its replicas have the same bytes, so that they stay the same over failovers. It takes
// a round for each replica.
func (c *Client) CompareRaw(ctx context.Context, ranges []RawRange, hashes []uint64, alike []bool) error {
	if len(hashes) < len(ranges) || len(alike) < len(ranges) {
		return fmt.Errorf("%w: room for %d hashes and %d answers of %d ranges", ErrArgument, len(hashes), len(alike), len(ranges))
	}
	return c.onRaw(ctx, KindRead, rawPlace{}, func(l *raw.Lane) error { return l.Compare(rawRanges(ranges), hashes, alike) })
}

// rawRanges are ranges with offsets from the start of their regions.
func rawRanges(ranges []RawRange) []raw.Range {
	list := make([]raw.Range, len(ranges))
	for i, g := range ranges {
		list[i] = raw.Range{Region: g.Region, Off: rawOff(g.Off), Bytes: g.Bytes}
	}
	return list
}

// LoadRaw reads a word of 8 bytes. off is a multiple of 8.
func (c *Client) LoadRaw(ctx context.Context, region uint32, off uint64) (v uint64, err error) {
	err = c.onRaw(ctx, KindRead, rawPlace{region: region}, func(l *raw.Lane) error { v, err = l.Load(region, rawOff(off)); return err })
	return v, err
}

// StoreRaw sets a word.
func (c *Client) StoreRaw(ctx context.Context, region uint32, off, value uint64) error {
	return c.onRaw(ctx, KindUpdate, rawPlace{region: region}, func(l *raw.Lane) error { return l.Store(region, rawOff(off), value) })
}

// SwapRaw sets a word to value if it is expect, and returns what it was. ErrUnknown: it may have been set, once.
func (c *Client) SwapRaw(ctx context.Context, region uint32, off, expect, value uint64) (old uint64, err error) {
	err = c.onRaw(ctx, KindUpdate, rawPlace{region: region}, func(l *raw.Lane) error {
		old, err = l.CompareAndSwap(region, rawOff(off), expect, value)
		return err
	})
	return old, err
}

// AddRaw adds to a word and returns what it was. ErrUnknown: it may have been added, once.
func (c *Client) AddRaw(ctx context.Context, region uint32, off, addend uint64) (old uint64, err error) {
	err = c.onRaw(ctx, KindUpdate, rawPlace{region: region}, func(l *raw.Lane) error { old, err = l.Add(region, rawOff(off), addend); return err })
	return old, err
}
