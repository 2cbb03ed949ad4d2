// Package fsck checks the whole structure of live regions through the fabric,
// with a read-only session of its own and nobody's help.
//
//	report, err := fsck.Cluster(ctx, fsck.Config{Controllers: urls})
//	if len(report.Findings) > 0 { ... }
//
// What it checks:
//
//   - region headers: seal, layout version, uuid and size as the table has them
//   - block headers: every field in range, the same on all replicas
//   - free-slab maps: LIVE and reserved slabs are taken; a slab that is taken,
//     FREE and unreserved has leaked
//   - words: spare bits zero; reservations name a session that the controllers know
//   - LIVE slabs: the active image has the right seal, version and born, and is
//     the same on all replicas, as is V
//   - objects of several slabs: every chunk of an index is there, every chunk
//     has an index
//
// Nothing stands still while it looks. What seems wrong is read again, with
// growing pauses; only what stays wrong is a finding. A client that is alive may
// leave the clearing of map bits and the freeing of chunks for later: while any
// session can write, such slabs count as pending. On a quiet cluster they are leaks.
//
// Repair mends what a check has found: damage from a replica that is whole,
// replicas that differ by the primary, maps by the words of the slabs, and what
// sessions have left that are fenced. What no replica has stays lost, and says so.
//
// Tests of packages below the client check regions of their own with Regions.
package fsck
