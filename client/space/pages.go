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
		cut, err := s.pieces(ctx, p.Bytes, p.Address)
		if err != nil {
			return err
		}
		list, sum = append(list, cut...), sum+len(p.Bytes)
	}
	if sum > client.MaxRawBytes {
		return fmt.Errorf("%w: %d bytes in one round: at most %d", client.ErrArgument, sum, client.MaxRawBytes)
	}
	return s.c.WriteRaw(ctx, list)
}

// Hashes stores the XXH3-64 of each part of n bytes from an address on, of at most client.MaxRawBytes together, in one round: as ReadAt might
// return them. No part lies over the border of regions.
func (s *Space) Hashes(ctx context.Context, va, n uint64, hashes []uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(hashes) > 0 && n > client.MaxRawBytes/uint64(len(hashes)) {
		return fmt.Errorf("%w: %d hashes of %d bytes in one round: at most %d bytes", client.ErrArgument, len(hashes), n, client.MaxRawBytes)
	}
	list := make([]client.RawRange, len(hashes))
	for i := range hashes {
		at := va + uint64(i)*n
		r, off, err := s.find(ctx, at, n)
		if err != nil {
			return err
		}
		if off+n > r.DataBytes {
			return fmt.Errorf("%w: %d bytes at %#x lie in two regions", client.ErrArgument, n, at)
		}
		list[i] = client.RawRange{Region: r.ID, Off: off, Bytes: n}
	}
	return s.c.HashRaw(ctx, list, hashes)
}
