package cxl

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// bothSides runs the litmus with two sides.
func bothSides(t *testing.T, a, b words, programs []program) (r [2]Report, errs [2]error) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	for i, w := range []words{a, b} {
		wg.Go(func() {
			s := &side{ctx: ctx, w: w, me: i, patience: time.Hour} // the guard is the test's own
			if r[i], errs[i] = s.litmus(programs, time.Hour); errs[i] != nil {
				stop()
			}
		})
	}
	wg.Wait()
	return r, errs
}

// scratch maps one memory twice, as two hosts do.
func scratch(t *testing.T) (a, b mapped) {
	fd, err := unix.MemfdCreate("scratch", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, ScratchBytes))
	for _, m := range []*mapped{&a, &b} {
		m.mem, err = unix.Mmap(fd, 0, ScratchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.NoError(t, err)
		t.Cleanup(func() { unix.Munmap(m.mem) })
	}
	return a, b
}

func TestCoherentMemoryPasses(t *testing.T) {
	programs := passable()
	if raced {
		t.Log("race detector: without store-load")
	}
	a, b := scratch(t)
	fill(a.mem, 0xa5a5a5a5) // what was there does not matter
	r, errs := bothSides(t, a, b, programs)
	require.NoError(t, errs[0])
	require.NoError(t, errs[1])
	require.Equal(t, r[0], r[1], "both sides say the same")
	require.NoError(t, r[0].Err())
	require.Len(t, r[0].Results, len(programs))
	for i, x := range r[0].Results {
		t.Logf("%-12s %8d steps, %7d met", x.Name, x.Rounds, x.Met)
		require.GreaterOrEqual(t, x.Met, programs[i].enough)
	}
	// And again on the same memory, which has the words of the first run.
	r, errs = bothSides(t, b, a, programs[:1])
	require.NoError(t, errs[0])
	require.NoError(t, errs[1])
	require.NoError(t, r[0].Err())
}

// Memory that does one thing wrong.
type (
	lostAdds  struct{ mapped }
	lostSwaps struct{ mapped }
	// buffering keeps its last store of a pair's word until its next store: a processor whose store is not followed by a fence.
	buffering struct {
		mapped
		off int
		v   uint64
	}
	// flagFirst stores a flag before the bytes written in front of it.
	flagFirst struct {
		mapped
		off int
		b   []byte
	}
	tearing struct{ mapped }
)

func (w lostAdds) add(off int, v uint64) uint64 {
	old := w.load(off)
	w.store(off, old+v)
	return old
}

func (w lostSwaps) cas(off int, expect, v uint64) uint64 {
	if old := w.load(off); old != expect {
		return old
	}
	w.store(off, v)
	return expect
}

func (w *buffering) store(off int, v uint64) {
	if w.off != 0 {
		w.mapped.store(w.off, w.v)
		w.off = 0
	}
	if off >= arrays && off%64 == 0 {
		w.off, w.v = off, v
		return
	}
	w.mapped.store(off, v)
}

func (w *flagFirst) write(off int, b []byte) {
	if len(b) != recordBytes {
		w.mapped.write(off, b)
		return
	}
	w.off, w.b = off, b
}

func (w *flagFirst) store(off int, v uint64) {
	w.mapped.store(off, v)
	if w.b != nil {
		w.mapped.write(w.off, w.b)
		w.b = nil
	}
}

func (w tearing) store(off int, v uint64) {
	if off == counter {
		old := w.load(off)
		w.mapped.store(off, old&^0xffffffff|v&0xffffffff)
	}
	w.mapped.store(off, v)
}

// Each program finds a memory that does wrong what it asks about.
func TestIncoherentMemoryIsFound(t *testing.T) {
	for i, wrong := range []func(mapped) words{
		func(m mapped) words { return lostAdds{m} },
		func(m mapped) words { return lostSwaps{m} },
		func(m mapped) words { return &buffering{mapped: m} },
		func(m mapped) words { return &flagFirst{mapped: m} },
		func(m mapped) words { return tearing{m} },
	} {
		t.Run(programs[i].name, func(t *testing.T) {
			a, b := scratch(t)
			r, errs := bothSides(t, wrong(a), wrong(b), programs[i:i+1])
			require.NoError(t, errs[0])
			require.NoError(t, errs[1])
			require.Equal(t, r[0], r[1])
			require.ErrorIs(t, r[0].Err(), ErrIncoherent)
		})
	}
}

// A host whose stores do not arrive, or that is not there, is an error and no pass.
func TestOtherHostIsSilent(t *testing.T) {
	a, _ := scratch(t)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	_, err := Litmus(ctx, a.mem, 0, time.Hour)
	require.ErrorIs(t, err, errNoOther)
	// Both run, on two memories.
	b, _ := scratch(t)
	ctx, stop = context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { _, err := Litmus(ctx, a.mem, 0, time.Hour); done <- err }()
	go func() { _, err := Litmus(ctx, b.mem, 1, time.Hour); done <- err }()
	stop()
	require.ErrorIs(t, <-done, errNoOther)
	require.ErrorIs(t, <-done, errNoOther)
}

// What the memory held is not overwritten unasked.
func TestOccupiedMemoryIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory")
	require.NoError(t, os.WriteFile(path, make([]byte, 3*ScratchBytes), 0o600))
	mem, end, err := OpenScratch(path, ScratchBytes, false)
	require.NoError(t, err)
	fill(mem[arrays:], 7)
	require.NoError(t, end())
	_, end, err = OpenScratch(path, ScratchBytes, false)
	require.NoError(t, err, "an earlier litmus's")
	require.NoError(t, end())
	_, _, err = OpenScratch(path, ScratchBytes/2, false)
	require.ErrorIs(t, err, ErrOccupied)
	_, _, err = OpenScratch(path, 5, false)
	require.ErrorContains(t, err, "from a multiple of 4096 on")
	_, _, err = OpenScratch(path, 2*ScratchBytes+4096, false)
	require.ErrorContains(t, err, "the litmus takes")
	_, _, err = OpenScratch("/dev/null", 0, false)
	require.ErrorContains(t, err, "is not device DAX")
	_, _, err = OpenScratch(t.TempDir(), 0, false)
	require.Error(t, err)
	mem, end, err = OpenScratch(path, ScratchBytes/2, true)
	require.NoError(t, err)
	require.Len(t, mem, ScratchBytes)
	require.NoError(t, end())
}
