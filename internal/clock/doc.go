// Package clock is the one place where Quarry reads time for leases and
// deadlines: nanoseconds of the monotonic clock since the process started.
//
// CLOCK_BOOTTIME, which also counts suspension of the host, costs a system call
// (263 ns on the machine of docs/BENCHMARKS.md) where the monotonic clock costs
// 25 ns from the vDSO. Now uses the latter. Suspended tells by how much the two have
// drifted apart. Look also tells the wall clock, which a suspension moves too: where it
// has moved against the monotonic clock, and only there, Suspended has to be asked.
//
// While the wall clock is being corrected the kernel lets the monotonic clock run at
// another rate: up to MaxSlewPercent, which chrony's default comes close to. Raw is free
// of that, and costs a system call.
package clock
