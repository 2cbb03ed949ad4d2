// Package alloc allocates slabs with one-sided verbs alone. It claims free slabs in
// advance and keeps the claims in magazines, so that an allocation needs no round of its
// own. It formats free blocks for a size class, clears the map bits of freed slabs, and
// reclaims empty blocks.
//
// Like package slab it is a program over rounds: no clock, goroutine or randomness inside.
// An Allocator works on one lane and belongs to the goroutine of that lane.
//
// # Claims
//
// Refill costs two rounds for up to 64 slabs:
//
//  1. CAS one word of a free-slab map to claim bits, and READ the block's header: if the
//     block has changed its class meanwhile, the bits are cleared again.
//  2. CAS R of each slab from 0 to the session and READ its V: now every claim names its
//     holder.
//
// Invariant: R and V decide whether a slab is free. The map is a search aid: a set bit only
// means that a search skips the slab, and every map can be rebuilt from R and V.
//
// The three levels are the block allocator, slab allocator and memory region of
// US 2017/0149890 [0068]; the self-directed allocation by CAS is its [0031].
package alloc
