// Package slab is the slab protocol: Read, Update, Birth, Free, and the takeover
// of what a dead session left, as programs over rounds of verbs.
//
// A program waits only in Port.Do, Port.Settle and Port.Pause. It reads no clock,
// draws no random number, starts no goroutine: these come in through Port. So
// the same code runs on real fabrics and, as a coroutine, in the simulator.
//
// # Invariants
//
//  1. Only the session named in R changes V, on any replica, while it is not fenced.
//  2. On every in-sync replica V names a whole image or FREE, whenever R of the
//     primary is 0; a takeover restores this before anything else.
//  3. Backups are flipped before the primary: what a reader has seen at the
//     primary, no failover can lose.
//  4. The active image is never written: a writer that dies leaves the old value.
//
// # Three answers
//
// nil; an error that means not done and never will be; ErrUnknown. A program
// that cannot settle what it posted ends its session, so that fence and scrub
// settle it: no orphans of the living.
//
// # Obligations of the caller
//
// A Lane belongs to one goroutine at a time. Payloads passed to callbacks alias
// the lane's scratch memory and die with the callback.
package slab
