// Package resp is a door for Redis clients: it serves the Redis protocol, RESP2 and
// RESP3, from a tree.
//
//	s := resp.New(resp.Config{Tree: tree})
//	err := s.Serve(ctx, listener)
//
// A gateway keeps nothing that matters: any number of them over one tree are one
// database. What is atomic and what is not stands in docs/REDIS.md.
//
// # Records in the tree
//
// The layout is part of the format; numbers in keys are big endian, so that keys
// sort as numbers do.
//
//	db:8 | key                          the record of a key; db is 0 to 15
//	'f' | id:64 | field or member       a field's value, or a member's score
//	's' | id:64 | score:64 | member     empty: the order of a sorted set
//	'i' | id:64                         whose fields these are
//
//	record of a key   | kind:4 raw:1 spare:1 dying:1 expires:1 | expiry:64, if expires | value or id:64 |
//	score             | IEEE 754 bits; in keys flipped so that they sort
//	record of an id   | kind:8 | made:64 | db:8 | key |
//
// Times are milliseconds since 1970 by the wall clock of a gateway. A key that is
// past its expiry is as good as absent.
//
// # Invariants
//
//  1. A hash or sorted set is what hangs on the id that its key's record names. Ids
//     are never used twice, so replacing or deleting the record ends all fields at
//     once; what is left of them is swept.
//  2. Every member of a sorted set has its place in the order ('s') before its score
//     says so, and loses the old place afterwards. A place that does not agree with
//     the member's score does not count: somebody died, or is on the way.
//  3. A writer of a field looks at the key's record again afterwards; who wants to
//     remove an empty key marks its record as dying before he looks whether it is
//     empty. So one of the two sees the other, and no field that was acknowledged
//     goes with an empty hash.
//
// # Obligations of the caller
//
// The client behind the tree outlives the Server. A Server serves until its context
// ends; Serve returns when all connections are gone.
package resp
