// Package kv opens trees by name and uses them through a client. The tree itself is
// package btree, a program that knows nothing of clients, clocks and goroutines.
//
//	t, err := kv.Create(ctx, c, "users", btree.Config{})
//	err = t.Put(ctx, []byte("ada"), []byte("lovelace"))
//	v, err := t.Get(ctx, []byte("ada"), nil)
//	err = t.Scan(ctx, btree.Range{From: []byte("a")}, func(key, value []byte, version uint64) bool { return true })
//
// A Tree is safe for many goroutines. Slices given to callbacks die with the callback.
package kv
