package space

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// This file serves what keeps copies of a space's bytes: package vmm and its pager.

// Identity tells spaces apart, also those of one name.
type Identity struct {
	Cluster [16]byte // UUID
	Tenant  uint32
	Name    string
	Base    uint64
	Region  uint32 // number of the first region: another one if the space was deleted and made again
}

// Identity says which space this is.
func (s *Space) Identity() Identity {
	l := s.layout.Load()
	return Identity{s.c.Cluster(), s.c.Tenant(), s.name, l.base, l.regions[0].ID}
}

// Name is the space's name.
func (s *Space) Name() string { return s.name }

// ReadOnly says whether the client of the space can only read it.
func (s *Space) ReadOnly() bool { return s.c.ReadOnly() }

// Piece is a range of a space with its bytes.
type Piece struct {
	Address uint64
	Bytes   []byte
}

// WritePieces writes pieces, of at most client.MaxRawBytes together, in one round. An error other than client.ErrUnknown: no byte is written.
func (s *Space) WritePieces(ctx context.Context, pieces []Piece) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var list []client.RawPiece
	sum := 0
	for _, p := range pieces {
		if _, _, err := s.find(ctx, p.Address, uint64(len(p.Bytes))); err != nil {
			return err
		}
		var err error
		if list, err = s.pieces(ctx, list, p.Bytes, p.Address); err != nil {
			return err
		}
		sum += len(p.Bytes)
	}
	if sum > client.MaxRawBytes {
		return fmt.Errorf("%w: %d bytes in one round: at most %d", client.ErrArgument, sum, client.MaxRawBytes)
	}
	return s.c.WriteRaw(ctx, list)
}

// Hashes stores the XXH3-64 of each part of n bytes from an address on, of at most client.MaxRawBytes together, in one round: as ReadAt might
// return them. No part lies over the border of regions.
func (s *Space) Hashes(ctx context.Context, va, n uint64, hashes []uint64) error {
	list, err := s.ranges(ctx, va, n, len(hashes))
	if err != nil {
		return err
	}
	return s.c.HashRaw(ctx, list, hashes)
}

// Compare stores the hash of each part at the primary, as Hashes does, and in alike whether every replica has the same hash and no replica is
// being rebuilt. It takes one round for each replica. If nobody writes, a failover does not change the bytes of a part that is alike. A Write
// that failed, or whose client died, can leave replicas that differ.
func (s *Space) Compare(ctx context.Context, va, n uint64, hashes []uint64, alike []bool) error {
	list, err := s.ranges(ctx, va, n, len(hashes))
	if err != nil {
		return err
	}
	if len(alike) != len(hashes) {
		return fmt.Errorf("%w: %d hashes and %d answers", client.ErrArgument, len(hashes), len(alike))
	}
	return s.c.CompareRaw(ctx, list, hashes, alike)
}

// ranges are so many parts of n bytes from an address on.
func (s *Space) ranges(ctx context.Context, va, n uint64, parts int) ([]client.RawRange, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if parts > 0 && n > client.MaxRawBytes/uint64(parts) {
		return nil, fmt.Errorf("%w: %d hashes of %d bytes in one round: at most %d bytes", client.ErrArgument, parts, n, client.MaxRawBytes)
	}
	list := make([]client.RawRange, parts)
	for i := range list {
		at := va + uint64(i)*n
		r, off, err := s.find(ctx, at, n)
		if err != nil {
			return nil, err
		}
		if off+n > r.DataBytes {
			return nil, fmt.Errorf("%w: %d bytes at %#x lie in two regions", client.ErrArgument, n, at)
		}
		list[i] = client.RawRange{Region: r.ID, Off: off, Bytes: n}
	}
	return list, nil
}
