// Package raw runs programs over raw regions (proto.RegionRaw), whose data is plain bytes: reads and writes of ranges, changes
// of words, and what makes and keeps replicas alike. It works on lanes of package slab, and like that package has no clock,
// goroutine or randomness of its own.
//
// # Ranges
//
// Read READs at the primary. Write sends to all replicas in sync in one round, and returns when all have answered: a failover keeps
// acknowledged bytes. Rebuilding replicas get the bytes in a second round, behind the primary (see CopyBlock).
//
// Only words are atomic: a Read beside a Write of the same bytes may return some of either. Two concurrent Writes of the same bytes
// may leave replicas different, and so may a Write whose client dies. Readers see the primary; the next failover makes the replicas
// alike.
//
// # Words
//
// Store, CompareAndSwap and Add change aligned words of 8 bytes; they linearize, with each other and across failovers. In a region
// with one replica a change is one atomic verb; Store repeats a CAS until it finds what it expects. With more replicas, a change holds
// the word's reservation (proto.RawR) at the primary:
//
//	1  P        CAS reservation 0 -> me; READ word
//	2  backups  WRITE word
//	3  P        WRITE word; CAS reservation me -> 0        linearizes at the WRITE
//
// Invariant: every in-sync backup has a word before the primary shows it. A replica that is being rebuilt gets the word between the
// WRITE at P and the release. The reservation names the word: when the fence of a dead session is certified, another session takes its
// reservation over and copies the word from P to the other replicas.
//
// # Durable regions
//
// A FLUSH follows each WRITE and each atomic, before the release where a word is reserved, and a taker flushes the word at P. So a word
// without a reservation is on stable storage at P. Load READs the word, then the reservation: if it is held, Load flushes the word
// before it answers. With one replica there are no reservations, and Load flushes always. So a word that was returned survives a loss of
// power, whichever replica becomes the primary. Read does not flush: bytes that it returned may be gone after a loss of power if their
// Write was not acknowledged.
//
// # Failover
//
// The primary wins: ReconcileBlock copies the pieces in which a replica in sync differs. It clears the reservations, and in a durable
// region flushes all replicas.
package raw
