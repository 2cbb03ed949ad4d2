package pmem

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func anonymous(t *testing.T, n int) []byte {
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Munmap(mem) })
	return mem
}

// Every way runs on ranges of any place and length, up to the last byte of a mapping, changes nothing, and
// allocates nothing.
func TestWaysRun(t *testing.T) {
	mem := anonymous(t, 8192)
	for i := range mem {
		mem[i] = byte(i * 7)
	}
	before := bytes.Clone(mem)
	for _, f := range Flushers() {
		for _, off := range []uint64{0, 1, 63, 64, 65, 4095, 8128, 8191} {
			for _, n := range []uint64{0, 1, 63, 64, 65, 128, 4096, 8192} {
				require.NoError(t, f.Persist(mem, off, min(n, 8192-off)))
			}
		}
		require.Zero(t, testing.AllocsPerRun(100, func() { _ = f.Persist(mem, 100, 4000) }), "%v", f.Way())
	}
	require.Equal(t, before, mem)
}

// A long range is written back in pieces, between which a garbage collection can stop the goroutine: each byte once, no line twice,
// and one fence at the end.
func TestLongRangesAreWrittenBackInPieces(t *testing.T) {
	const most = 256 << 10
	type span struct{ off, n uint64 }
	var pieces []span
	fences := 0
	f := Flusher{way: CLWB, unit: &unit{
		writeBack: func(_ []byte, off, n uint64) { pieces = append(pieces, span{off, n}) },
		fence:     func() { fences++ },
	}}
	for _, r := range []span{{0, 1}, {100, 64}, {0, most}, {0, most + 1}, {1, most}, {most - 1, 2}, {4097, 10*most + 13}} {
		pieces, fences = nil, 0
		require.NoError(t, f.Persist(nil, r.off, r.n))
		require.Equal(t, 1, fences, "%v", r)
		at := r.off
		for i, p := range pieces {
			require.Equal(t, at, p.off, "%v", r)
			require.LessOrEqual(t, p.n, uint64(most), "%v", r)
			require.True(t, i == 0 || at%4096 == 0, "%v: two pieces share a line", r)
			at += p.n
		}
		require.Equal(t, r.off+r.n, at, "%v", r)
	}
}

// What is streamed arrives, and nothing beside it changes, at every offset of a line and every length of some lines.
func TestStream(t *testing.T) {
	mem := anonymous(t, 4096)
	src := make([]byte, 512)
	for i := range src {
		src[i] = byte(i) | 1
	}
	tried := false
	for _, f := range Flushers() {
		if !f.Streams() {
			continue
		}
		tried = true
		for off := uint64(1024); off < 1024+64; off += 8 {
			for n := 0; n <= len(src); n += 8 {
				clear(mem)
				f.Stream(mem, off, src[:n])
				require.Equal(t, src[:n], mem[off:off+uint64(n)])
				require.Equal(t, make([]byte, off), mem[:off])
				require.Equal(t, make([]byte, uint64(len(mem)-n)-off), mem[off+uint64(n):])
			}
		}
		require.Zero(t, testing.AllocsPerRun(100, func() { f.Stream(mem, 8, src) }))
	}
	require.Equal(t, runtime.GOARCH == "amd64", tried)
}

// The kernel says what a mapping is: an ordinary file is flushed by pages where its file system is
// trusted, and not at all elsewhere.
func TestOrdinaryFilesAreFlushedByPages(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(8192))
	for _, trusted := range []bool{true, false} {
		m, err := Map(f, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, trusted)
		require.NoError(t, err)
		require.Equal(t, trusted, m.Flusher.Persistent())
		want := Persistence{Kind: KindVolatile, Flush: "none"}
		if trusted {
			want = Persistence{Kind: KindFile, Flush: "msync"}
			require.NoError(t, m.Flusher.Persist(m.Mem, 4095, 2))
			require.NoError(t, m.Flusher.Persist(m.Mem, 8191, 1))
		}
		require.Equal(t, want, m.Persistence())
		require.NoError(t, m.Unmap())
	}
}
