package pmem

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// lineBytes of a cache line of amd64, and of a Ledger. An arm64 says its own.
const lineBytes = 64

// Flusher makes the stores to one mapping durable. It is chosen once, when the memory is mapped. The
// zero Flusher is of volatile memory.
type Flusher struct {
	way     Way
	unit    *unit    // nil: pages or nothing
	failure *failure // see StopAtError; nil: errors are forgotten
}

// unit writes lines back: the processor's instructions, or a Ledger.
type unit struct {
	// writeBack begins to write back the lines of a range. The fence completes it.
	writeBack func(mem []byte, off, n uint64)
	// stream stores whole words past the caches, which the fence makes visible and durable; nil: there is
	// no such instruction. Preconditions: off and len(src) are multiples of 8.
	stream func(mem []byte, off uint64, src []byte)
	fence  func()
}

// flusherOf is the Flusher of a way. Preconditions: the processor has it.
func flusherOf(w Way) Flusher {
	return Flusher{way: w, unit: unitOf(w)}
}

// Flushers are those of every way that this processor can do; for tests and measurements, on any memory.
func Flushers() (all []Flusher) {
	for w := Msync; w <= FenceAlone; w++ {
		_, err := choose(runtime.GOARCH, cpuFeatures(), w.String())
		if f := flusherOf(w); err == nil && (w == Msync || f.unit != nil) || w == FenceAlone && f.unit != nil {
			all = append(all, f)
		}
	}
	return all
}

// Persistent says whether what was flushed survives a loss of power.
func (f Flusher) Persistent() bool { return f.way != NoWay }

// Way is how ranges are flushed.
func (f Flusher) Way() Way { return f.way }

// Granularity is page, line or none (see the package comment); volatile for memory that does not survive.
func (f Flusher) Granularity() string {
	switch f.way {
	case NoWay:
		return "volatile"
	case Msync:
		return "page"
	case FenceAlone:
		return "none"
	}
	return "line"
}

// StreamBytes is the length from which a WRITE to memory of granularity line goes past the caches. Through the
// cache such a WRITE reads each line from the medium first and writes it back soon after. What is shorter, such as a small slab, is likely to be read again from the cache.
const StreamBytes = 2048

// Streams says whether Stream is for this memory.
func (f Flusher) Streams() bool { return f.unit != nil && f.unit.stream != nil }

// Stream stores src at off past the caches, word by word without tearing. When it returns the stores are visible
// in order with earlier and later ones, and durable.
//
// Preconditions: Streams; off and len(src) are multiples of 8 and within mem; mem is aligned to 8.
func (f Flusher) Stream(mem []byte, off uint64, src []byte) {
	f.unit.fence() // streamed stores are weakly ordered: without the fences an earlier or a later WRITE
	f.unit.stream(mem, off, src)
	f.unit.fence() // might be seen at another place in the order of the chain
}

// Persist returns when a range survives a loss of power. The error is of msync, and names the range.
//
// Preconditions: the range is within mem, a whole mapping; Persistent.
func (f Flusher) Persist(mem []byte, off, n uint64) error {
	if n == 0 {
		return nil
	}
	if f.way == Msync {
		if err := f.failure.known(); err != nil {
			return err
		}
		if err := msync(mem, off, n); err != nil {
			f.failure.keep(err)
			return err
		}
		return f.Failed() // of others meanwhile: msync tells one of those who map the same open file alone
	}
	if f.way != FenceAlone {
		for end := off + n; off < end; {
			piece := min(pieceBytes-off%pieceBytes, end-off)
			f.unit.writeBack(mem, off, piece)
			off += piece
		}
	}
	f.unit.fence()
	return nil
}

// pieceBytes bounds one write-back. It is assembly, in which the runtime cannot stop a goroutine: a garbage
// collection, and with it the whole process, waits for its end. A multiple of every line's length.
const pieceBytes = 256 << 10

// msync flushes whole pages around a range.
func msync(mem []byte, off, n uint64) error {
	page := uint64(os.Getpagesize())
	start := off &^ (page - 1)
	end := min((off+n+page-1)&^(page-1), uint64(len(mem)))
	if err := unix.Msync(mem[start:end], unix.MS_SYNC); err != nil {
		return fmt.Errorf("flushing %d bytes at %d: %w", n, off, err)
	}
	return nil
}
