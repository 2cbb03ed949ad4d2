//go:build arm64

package pmem

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// cvap cleans the lines of a range to the point of persistence. Preconditions: bytes is not 0.
//
//go:noescape
func cvap(at unsafe.Pointer, bytes, line uint64)

// dsb returns when the cleans before it have completed.
func dsb()

// ctr reads CTR_EL0.
func ctr() uint64

func cpuFeatures() features { return features{dcCVAP: cpu.ARM64.HasDCPOP} }

// line is the smallest data line of all caches: CTR_EL0.DminLine, the logarithm of 4-byte words.
var line = uint64(4) << (ctr() >> 16 & 0xf)

func rangeOf(mem []byte, off, n uint64) (unsafe.Pointer, uint64, uint64) {
	return unsafe.Pointer(unsafe.SliceData(mem[off : off+n])), n, line
}

var units = map[Way]*unit{
	DCCVAP:     {writeBack: func(mem []byte, off, n uint64) { cvap(rangeOf(mem, off, n)) }, fence: dsb},
	FenceAlone: {fence: dsb},
}

func unitOf(w Way) *unit { return units[w] }
