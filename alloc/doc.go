// Package alloc finds free slabs, by one-sided verbs alone: it claims them ahead
// into magazines so that an allocation costs no round trip, formats free blocks,
// and gives back what is not needed.
//
// Like package internal/slab it is a program over rounds: no clock, goroutine or
// randomness inside. An Allocator works on one lane and belongs to its goroutine.
//
// # Claims
//
// Refill costs two rounds for up to 64 slabs:
//
//  1. CAS one word of a free-slab map to claim bits, and READ the block's header:
//     if the block is not the one the bits were meant for, they are given back.
//  2. CAS R of each slab to the session and READ its V: now every claim names its holder.
//
// Invariant: R and V are the truth. A set bit says "do not look here"; an agent
// can rebuild every map from the slabs' words.
//
// The three levels are the block allocator, slab allocator and memory region of
// US 2017/0149890 [0068]; the self-directed allocation by CAS is its [0031].
package alloc
