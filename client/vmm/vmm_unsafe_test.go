package vmm_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
)

func init() {
	programs["model"] = modelProgram
}

// words are the memory of a mapping as words that programs load and store whole.
func words(m *vmm.Mapping) []atomic.Uint64 {
	b := m.Bytes()
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}

// plainWords are words of a mapping for accesses that may fault for good: in programs built with the race detector, atomics fault in its C code,
// from where Do cannot return.
func plainWords(m *vmm.Mapping) []uint64 {
	b := m.Bytes()
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}

// modelProgram makes random accesses: of every two words it stores into one, arg 0, and loads both. Its own words are what it has stored, and those of the other program
// only rise. At the end its model is in the file arg 2.
func modelProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	mine, accesses := p.arg(0), p.arg(1)
	w := words(m)
	model, seen := make([]uint64, len(w)), make([]uint64, len(w))
	rng := rand.New(rand.NewPCG(uint64(mine), 7))
	buf := make([]byte, 3*page)
	for n := range accesses {
		i := rng.IntN(len(w)/2) * 2
		if n%8 < 4 { // near the one before
			i = (int(seen[0]) + 2*n) % len(w) &^ 1
		}
		own, other := i+mine, i+1-mine
		switch {
		case n%3 == 0:
			model[own] = uint64(n + 1)
			w[own].Store(model[own])
		case n%64 == 1: // a copy of several pages, in which a goroutine cannot be stopped
			at := rng.IntN(len(w)*8 - len(buf))
			copy(buf, m.Bytes()[at:])
			runtime.GC()
		default:
			if v := w[own].Load(); v != model[own] {
				return fmt.Errorf("access %d: word %d is %d, not %d", n, own, v, model[own])
			}
			v := w[other].Load()
			if v < seen[other] {
				return fmt.Errorf("access %d: word %d of the other program went from %d to %d", n, other, seen[other], v)
			}
			seen[other] = v
		}
		if n%500 == 499 {
			if err := m.Sync(p.ctx, m.Base()+uint64(own)*8, 8); err != nil {
				return err
			}
		}
		if n%700 == 699 {
			if _, err := m.Acquire(p.ctx, m.Base()+uint64(i)*8&^(page-1), page); err != nil {
				return err
			}
		}
	}
	if err := m.Close(); err != nil {
		return err
	}
	b := make([]byte, 0, 8*len(model))
	for _, v := range model {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return os.WriteFile(p.args[2], b, 0o600)
}

// TestModel: two programs of a host store into every other word of the same pages, many more than the pager keeps, under a garbage collector that runs all the
// time. Each of them sees its own stores, none of the other's is lost, and in the end the space has them.
func TestModel(t *testing.T) {
	k := newKit(t, 2)
	h := k.host("--memory", "1MiB", "--read-ahead", "64KiB")
	s := k.space("model", 4*mib, space.Options{RegionBytes: mib, Replicas: 2})
	var children []*child
	dir := t.TempDir()
	for i := range 2 {
		children = append(children, h.start("model", s, []string{"GOGC=1"}, strconv.Itoa(i), "20000", filepath.Join(dir, strconv.Itoa(i))))
	}
	for _, c := range children {
		c.wait()
	}
	got := make([]byte, s.Bytes())
	_, err := s.Read(t.Context(), got, s.Base())
	require.NoError(t, err)
	var models [][]byte
	for i := range 2 {
		b, err := os.ReadFile(filepath.Join(dir, strconv.Itoa(i)))
		require.NoError(t, err)
		models = append(models, b)
	}
	stores := 0
	for at := 0; at < len(got); at += 8 {
		want := models[at/8%2][at:][:8]
		if !bytes.Equal(want, make([]byte, 8)) {
			stores++
		}
		require.Equal(t, want, got[at:][:8], "word %d", at/8)
	}
	require.Greater(t, stores, 5000)
	require.Positive(t, h.metric("quarry_pager_evictions_total"))
	require.LessOrEqual(t, h.metric("quarry_pager_pages"), 256)
	t.Log(h.metric("quarry_pager_faults_total"), h.metric("quarry_pager_evictions_total"))
	require.Zero(t, h.metric("quarry_pager_failed_writes_total"))
}
