package litmus

import (
	"bytes"
	"context"
	"encoding/binary"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

// fill sets every word of b to n.
func fill(b []byte, n uint64) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], n)
	}
}

// uniform says whether every word of b is at least n.
func uniform(b []byte, n uint64) bool {
	for i := 0; i+8 <= len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) < n {
			return false
		}
	}
	return true
}

// writeRead: a lane READs what another lane has written.
func writeRead(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 2)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	out, in := lanes[0].buffer(4096), lanes[1].buffer(4096)
	for n := uint64(1); time.Now().Before(until); n++ {
		size := 64 << (n % 7)
		fill(out[:size], n)
		if _, err := lanes[0].do(func(c *rdma.Chain) { c.Write(0, out[:size]) }); err != nil {
			return rounds, bad, "", err
		}
		if _, err := lanes[1].do(func(c *rdma.Chain) { c.Read(0, in[:size]) }); err != nil {
			return rounds, bad, "", err
		}
		if rounds++; !bytes.Equal(out[:size], in[:size]) {
			bad++
		}
	}
	return rounds, bad, "", nil
}

// writeCAS: one lane posts chains of a WRITE and a CAS, another READs the word first and
// then the written bytes.
func writeCAS(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 2)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	const data, size = 4096, 2048
	var over atomic.Bool
	err = together(2, func(i int) error {
		if i == 0 {
			defer over.Store(true)
			out := lanes[0].buffer(size)
			for n := uint64(1); time.Now().Before(until); n++ {
				fill(out, n)
				if _, err := lanes[0].do(func(c *rdma.Chain) { c.Write(data, out); c.CAS(0, n-1, n) }); err != nil {
					return err
				}
			}
			return nil
		}
		in, number := lanes[1].buffer(size), lanes[1].buffer(8)
		for !over.Load() {
			if _, err := lanes[1].do(func(c *rdma.Chain) { c.Read(0, number); c.Read(data, in) }); err != nil {
				return err
			}
			if rounds++; !uniform(in, binary.LittleEndian.Uint64(number)) {
				bad++
			}
		}
		return nil
	})
	return rounds, bad, "", err
}

// readWrite: a READ and a fenced WRITE of the same place in one chain.
func readWrite(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 1)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	in, out := lanes[0].buffer(4096), lanes[0].buffer(4096)
	for n := uint64(1); time.Now().Before(until); n++ {
		fill(out, n)
		if _, err := lanes[0].do(func(c *rdma.Chain) { c.Read(0, in); c.Write(0, out); c.Fenced() }); err != nil {
			return rounds, bad, "", err
		}
		rounds++
		for i := 0; i < len(in); i += 8 {
			if binary.LittleEndian.Uint64(in[i:]) != n-1 {
				bad++
				break
			}
		}
	}
	return rounds, bad, "", nil
}

// tornWords: WRITEs of all zeros and all ones, READs elsewhere.
func tornWords(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 2)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	const size = 1024
	var over atomic.Bool
	err = together(2, func(i int) error {
		if i == 0 {
			defer over.Store(true)
			out := lanes[0].buffer(size)
			for n := uint64(0); time.Now().Before(until); n++ {
				fill(out, -(n & 1))
				if _, err := lanes[0].do(func(c *rdma.Chain) { c.Write(0, out) }); err != nil {
					return err
				}
			}
			return nil
		}
		in := lanes[1].buffer(size)
		for !over.Load() {
			if _, err := lanes[1].do(func(c *rdma.Chain) { c.Read(0, in) }); err != nil {
				return err
			}
			rounds++
			for i := 0; i < size; i += 8 {
				if w := binary.LittleEndian.Uint64(in[i:]); w != 0 && w != ^uint64(0) {
					bad++
					break
				}
			}
		}
		return nil
	})
	return rounds, bad, "", err
}

// flushed: a processor reads the written bytes as soon as the FLUSH has completed.
func flushed(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 1)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	kind := rdma.Visible
	if s.Memory.Persistent() {
		kind = rdma.Persistent
	}
	var before uint64
	if s.Flushed != nil {
		before = s.Flushed()
	}
	const size = 4096
	out, mem := lanes[0].buffer(size), s.Memory.Bytes()
	for n := uint64(1); time.Now().Before(until); n++ {
		fill(out, n)
		if _, err := lanes[0].do(func(c *rdma.Chain) { c.Write(0, out); c.Flush(kind, 0, size) }); err != nil {
			return rounds, bad, "", err
		}
		rounds++
		for off := uint64(0); off < size; off += 8 {
			if load(mem, off) != n {
				bad++
				break
			}
		}
	}
	switch {
	case kind == rdma.Persistent:
		note = "persistent"
	case s.Flushed != nil && s.Flushed() > before:
		note = "visible, native"
	default:
		note = "visible, by a READ"
	}
	return rounds, bad, note, nil
}

// writeOrder: a processor polls the last word of a WRITE and then reads the others.
func writeOrder(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error) {
	lanes, end, err := s.lanes(ctx, 1)
	if err != nil {
		return 0, 0, "", err
	}
	defer end()
	const size = 4096
	mem := s.Memory.Bytes()
	var over atomic.Bool
	err = together(2, func(i int) error {
		if i == 0 {
			defer over.Store(true)
			out := lanes[0].buffer(size)
			for n := uint64(1); time.Now().Before(until); n++ {
				fill(out, n)
				if _, err := lanes[0].do(func(c *rdma.Chain) { c.Write(0, out) }); err != nil {
					return err
				}
			}
			return nil
		}
		for seen := uint64(0); !over.Load(); {
			last := load(mem, size-8)
			if last == seen {
				continue
			}
			seen = last
			rounds++
			for off := uint64(0); off < size-8; off += 8 {
				if load(mem, off) < last {
					bad++
					break
				}
			}
		}
		return nil
	})
	return rounds, bad, "the protocols check a checksum instead", err
}
