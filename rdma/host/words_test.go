package host

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// words is memory as a region has it: aligned to a page.
func words(t testing.TB, n uint64) []byte {
	m, err := NewMemory("words", (n+4095)&^4095)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	return m.Bytes()
}

// Every way to begin and to end at every place within a line, and lengths on both
// sides of what is copied in another way.
func TestCopiesAtEveryPlace(t *testing.T) {
	mem := words(t, 16<<10)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
	want := bytes.Clone(mem)
	lengths := []uint64{1, 7, 8, 9, 63, 64, 65, 71, 72, 80, 88, 120, 128, 136, 511, 512, 513, 520, 1000, 2047, 2048, 2056, 2064, 2112, 2120, 2200, 4096, 5001}
	buf := make([]byte, 6000+64)
	for off := range uint64(80) {
		for _, n := range lengths {
			shift := rng.Uint64N(17) // of the private side
			dst := buf[shift : shift+n]
			clear(buf)
			copyOut(dst, mem, 64+off)
			require.Equal(t, want[64+off:64+off+n], dst, "out %d at %d", n, off)
			require.Zero(t, buf[shift+n], "behind %d at %d", n, off)

			for i := range dst {
				dst[i] = byte(rng.Uint32())
			}
			copyIn(mem, 64+off, dst)
			copy(want[64+off:], dst)
			if !bytes.Equal(want, mem) {
				require.Equal(t, want, mem, "in %d at %d", n, off)
			}
		}
	}
}

// A word that is written over and over is seen old or new, never as parts of both,
// whatever the size of the copy and wherever its words lie in their lines.
func TestWordsDoNotTear(t *testing.T) {
	mem := words(t, 16<<10)
	const n = 4096 - 64
	// A word of a pattern is the same byte eight times.
	var over atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		src := make([]byte, n)
		for k := byte(0); !over.Load(); k++ {
			for i := range src {
				src[i] = k
			}
			copyIn(mem, 8*uint64(k%9), src)
		}
	}()
	rounds := 4000
	if testing.Short() {
		t.Log("-short: fewer rounds")
		rounds = 400
	}
	got := make([]byte, n+64)
	for r := range rounds {
		dst := got[r%33:][:n-8*(r%41)]
		copyOut(dst, mem, 8*uint64(r%11))
		for at := 0; at+8 <= len(dst); at += 8 {
			if w := binary.LittleEndian.Uint64(dst[at:]); w != w&0xff*0x0101010101010101 {
				require.Equal(t, w&0xff*0x0101010101010101, w, "torn at %d", at)
			}
		}
		if r%64 == 0 {
			runtime.Gosched()
		}
	}
	over.Store(true)
	<-done
}
