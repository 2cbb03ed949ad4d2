// Package pmem makes stores to mapped memory survive a loss of power.
//
// A mapping has one of three granularities, decided once when it is made:
//
//	page   a file of a file system: msync writes whole pages to the medium
//	line   persistent memory, file or device (DAX): the cache lines are written back by an
//	       instruction, then a fence; the kernel takes no part
//	none   persistent memory whose processors' caches survive as well (eADR): a fence alone
//
// Lines may be written back only where the kernel has promised by MAP_SYNC that the file finds its
// blocks after a loss of power. What a device writes through an adapter makes no page fault, so the
// kernel does not know those pages as dirty and msync leaves them out: adapters need memory of
// granularity line or none.
//
// Invariant: after Persist has returned nil, every store to the range that was visible when it was
// called survives a loss of power. A store that no Persist has covered may survive or not, each
// aligned word of 8 bytes for itself.
//
// Ledger is a model of such memory in software, for tests: it shows a write-back or a fence that is
// missing, which neither an emulated processor nor ordinary memory can show. Processes of a test share ledgers by LedgersVariable.
package pmem
