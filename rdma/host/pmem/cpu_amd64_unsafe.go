//go:build amd64

package pmem

import "unsafe"

//go:noescape
func cpuid(leaf, sub uint32) (a, b, c, d uint32)

// Each begins to write back the lines of a range. Preconditions: bytes is not 0.
//
//go:noescape
func clflush(at unsafe.Pointer, bytes uint64)

//go:noescape
func clflushopt(at unsafe.Pointer, bytes uint64)

//go:noescape
func clwb(at unsafe.Pointer, bytes uint64)

// movnti stores words past the caches. Preconditions: to is aligned to 8, bytes is a multiple of 8.
//
//go:noescape
func movnti(to, from unsafe.Pointer, bytes uint64)

// sfence orders write-backs and streamed stores before all later stores; with memory that is in the
// domain of a loss of power's energy, they are durable when it has completed.
func sfence()

func cpuFeatures() (f features) {
	if top, _, _, _ := cpuid(0, 0); top < 1 {
		return f
	}
	_, b, _, d := cpuid(1, 0)
	if (b>>8&0xff)*8 != lineBytes {
		return f // the loops go by lines of this length
	}
	f.clflush = d>>19&1 != 0
	if top, _, _, _ := cpuid(0, 0); top >= 7 {
		_, b, _, _ := cpuid(7, 0)
		f.clflushopt, f.clwb = b>>23&1 != 0, b>>24&1 != 0
	}
	return f
}

func rangeOf(mem []byte, off, n uint64) (unsafe.Pointer, uint64) {
	return unsafe.Pointer(unsafe.SliceData(mem[off : off+n])), n
}

func stream(mem []byte, off uint64, src []byte) {
	to, n := rangeOf(mem, off, uint64(len(src)))
	movnti(to, unsafe.Pointer(unsafe.SliceData(src)), n)
}

var units = map[Way]*unit{
	CLFLUSH:    {writeBack: func(mem []byte, off, n uint64) { clflush(rangeOf(mem, off, n)) }, stream: stream, fence: sfence},
	CLFLUSHOPT: {writeBack: func(mem []byte, off, n uint64) { clflushopt(rangeOf(mem, off, n)) }, stream: stream, fence: sfence},
	CLWB:       {writeBack: func(mem []byte, off, n uint64) { clwb(rangeOf(mem, off, n)) }, stream: stream, fence: sfence},
	FenceAlone: {fence: sfence}, // its caches survive: streams would only empty them
}

func unitOf(w Way) *unit { return units[w] }
