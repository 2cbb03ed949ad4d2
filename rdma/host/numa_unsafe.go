package host

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// policyBind is MPOL_BIND: pages come from these nodes, or not at all. Reserve looks beforehand whether there are enough.
const policyBind = 2

// mbind sets the policy of a mapping's pages that are not there yet.
// Preconditions: mem is not empty; 0 <= node < maxNUMA.
func mbind(mem []byte, node int) error {
	var mask [maxNUMA / 64]uint64
	mask[node/64] = 1 << (node % 64)
	// The kernel uses one bit less than the number of bits that it is given.
	_, _, e := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(len(mem)), policyBind, uintptr(unsafe.Pointer(&mask)), maxNUMA+1, 0)
	if e != 0 {
		return e
	}
	return nil
}
