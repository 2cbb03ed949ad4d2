package pmem

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkPersist stores to lines and persists them, by each way of this processor: what a commit waits for, without the commit.
func BenchmarkPersist(b *testing.B) {
	mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Munmap(mem)
	for _, f := range Flushers() {
		if f.Way() == Msync {
			continue // memory has none
		}
		for _, lines := range []uint64{1, 3} {
			b.Run(fmt.Sprintf("%v/lines=%d", f.Way(), lines), func(b *testing.B) {
				for b.Loop() {
					for i := range lines {
						mem[64*i]++
					}
					if err := f.Persist(mem, 0, 64*lines); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
