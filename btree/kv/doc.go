// Package kv opens trees by name and uses them through a client. The tree itself is
// package btree, a program over slab operations without clients, clocks and goroutines.
//
//	t, err := kv.Create(ctx, c, "users", btree.Config{})
//	err = t.Put(ctx, []byte("ada"), []byte("lovelace"))
//	v, err := t.Get(ctx, []byte("ada"), nil)
//	err = t.Scan(ctx, btree.Range{From: []byte("a")}, func(key, value []byte, version uint64) bool { return true })
//
// # Sharing
//
// Writers of one process that want the same leaf share its reservation; see
// combine.go. Inner nodes are cached for all goroutines of a Tree: open a tree once.
// Trees under one name in several processes are one tree.
//
// # Replacement
//
// Stage, Commit and Settle replace the content of a tree as a whole; see replace.go.
//
// # Changes
//
// Watch delivers the changes of keys to a program that knows what it has; Follow to a receiver that may be killed, whose
// state is a tree: feed.go delivers, feedstate.go has the layout of the state and its owner.
//
// # Orphans
//
// Objects that a dead client made and linked nowhere are freed by Collect.
//
// A Tree is safe for many goroutines. Slices given to callbacks are valid during the callback.
package kv
