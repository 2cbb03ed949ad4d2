// Package redis serves the Redis protocol, RESP2 and RESP3, from a tree.
//
//	s := redis.New(redis.Config{Tree: tree})
//	err := s.Serve(ctx, listener)
//
// A gateway has no state of its own: any number of gateways over one tree are one database.
// docs/REDIS.md says which commands are atomic.
//
// A connection has one goroutine, which reads, parses, executes and answers (conn.go). A
// pipeline is one batch: its commands are parsed together (parse.go) and their replies are
// written together. One goroutine of the Server sweeps: it removes expired records and what
// dead gateways have left (sweep.go, family.go).
//
// # Records in the tree
//
// The layout is part of the format; numbers in keys are big endian, so that keys
// sort as numbers do.
//
//	db:8 | key                          the record of a key; db is 0 to 15
//	'f' | id:64 | field or member       a field's value, or a member's score
//	's' | id:64 | score:64 | member     empty: a place in the order of a sorted set
//	'i' | id:64                         the owner of an id: whose fields these are
//	'm' | id:64                         a RENAME that has begun and not ended
//
//	record of a key   | time:1 dying:1 mark:1 raw:1 newborn:1 kind:3 | expiry:64, if time | value or id:64 |
//	the same, a mark  | flags, with mark; 1 to 3 in the place of the kind | id:64 of the RENAME |
//	score             | IEEE 754 bits; in keys flipped so that they sort; none: a claim
//	owner             | building:1 condemned:1 kind:6 | made:64 | replaces:64, if building | db:8 | key |
//	RENAME            | state:8 | made:64 | versions:2*64 | lengths:2*16+32 | keys | records |
//
// Times are milliseconds since 1970 by the wall clock of a gateway. A key that is
// past its expiry is as good as absent.
//
// # Invariants
//
//  1. The key's record of a hash or sorted set has an id, and the fields have keys that begin
//     with that id. Ids are never used twice, so replacing or deleting the record ends all
//     fields at once; their records are removed afterwards. See family.go for the life of an
//     id, and move.go for how it gets another key.
//  2. A member's record is only ever replaced by its version: a writer that finds none
//     puts a claim first. A writer reads the member's version, then puts the place of
//     the new score, then the score, if the version is still the same. A place is
//     removed only by the version that it had before a change of the member to another
//     score, after that change. So a removed place belonged to a version that no longer
//     exists, and every member has its place. Readers ignore a place that does not agree
//     with the member's score.
//  3. Every load of a key's record clears its dying flag, and a writer loads the record
//     again after its write. A command that removes an empty key marks its record as dying
//     before the read that finds it empty. So one of the two sees the other, and no
//     acknowledged field is removed with an empty hash.
//  4. The owner of an id is removed before any of its fields. So a field that is not found is
//     absent only if the owner is still there afterwards; otherwise it may have been removed
//     with the id while its key named another id already. A command whose reply relies on
//     the absence of a field reads the owner after the field, and looks up the key again if
//     the owner is gone. A field that is found needs no such read.
//  5. A record of a key that exists is never replaced by one that counts as absent, unless
//     the key is removed.
//  6. A plain SET reads nothing. It is refused by a mark of a RENAME, as every other change
//     of a key's record is by the version that it names.
//
// # Obligations of the caller
//
// The client behind the tree outlives the Server. A Server serves until its context
// ends; Serve returns when all connections are gone.
package redis
