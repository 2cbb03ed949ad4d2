// Package shared boots two virtual machines on one memory, as two hosts behind a CXL switch have it. There is nothing here but tests.
//
// With two processors in each, qemu emulates atomics by the host's own: the machines are coherent. With one processor it executes them as
// loads and stores, which is coherent within each machine and not between the two: memory that must be refused.
package shared
