// Package fsck checks the whole structure of live regions through the fabric,
// with a read-only session of its own; no node or controller takes part.
//
//	report, err := fsck.Cluster(ctx, fsck.Config{Controllers: urls})
//	if len(report.Findings) > 0 { ... }
//
// What it checks:
//
//   - region headers: checksum, layout version, uuid and size as the table has them
//   - block headers: every field in range, the same on all replicas
//   - free-slab maps: LIVE and reserved slabs are taken; a slab that is taken,
//     FREE and unreserved has leaked
//   - words: spare bits zero; reservations name a session that the controllers know
//   - LIVE slabs: the active image has the right checksum, version and born, and is
//     the same on all replicas, as is V
//   - objects of several slabs: every chunk of an index is there, every chunk
//     has an index
//
// Payloads that are encrypted are checked as far as their envelopes and checksums; no key is needed. The
// indexes of encrypted objects are not secret.
//
// Regions that are not open, or of which some replica cannot be reached, are left out and
// named; the others are checked.
//
// Nothing stands still while it looks. What seems wrong is read again, with
// growing pauses; only what stays wrong is a finding. A client that is alive may
// leave the clearing of map bits for later: while any session can write, such slabs count
// as pending. On a quiet cluster they are leaks. Chunks without an index are pending
// until the session that wrote them is over, and leaks from then on: see slab.Survey.
//
// Repair repairs what a check has found. It restores damage from an intact replica, makes replicas
// that differ equal to the primary, corrects maps by the words of the slabs, settles what fenced
// sessions have left, and frees chunks that are orphans. What no replica has stays lost, and every
// check reports it.
//
// Tests of packages below the client check regions of their own with Regions.
package fsck
