// Package sim runs the protocol on a hostile fabric under one seeded scheduler.
//
// Clients are coroutines that run the programs of internal/slab and alloc on
// ports of package sim; the fabric is rdma/sim; sessions, leases, fences,
// certificates and failovers are a small model of the controller. Time is
// virtual, clocks run at their own rates. Nothing depends on Go's scheduler, the
// wall clock or the order of a map: the same options give the same digest.
//
// With Options.Tree the clients work on one B-tree of package btree, whose nodes they
// allocate, update and free in the same way: see tree.
//
// # Choices
//
// Everything that is left open is a choice: a number below n, 0 the tamest.
// A run is its list of choices; a failing list is shrunk by cutting it off and by
// putting zeros in it.
//
// # Checks
//
// While it runs: one unfenced holder per slab, V never falls at the primary
// within an epoch, nothing of a session runs once its fence is certified, what
// is committed is whole on every in-sync replica, the active image is not
// written. At the end, healed and scrubbed: replicas are alike, nothing has
// leaked, and each object's history is linearizable. A tree is proved whole, each key's
// history is linearizable, and what dead clients left unlinked can be collected.
package sim
