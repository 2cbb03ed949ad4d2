// Package controller is the control plane of a cluster: sessions and their
// leases, the distribution table, the placement library. State lives in etcd; one
// controller leads, any number stand by.
//
//	c, err := controller.Start(ctx, controller.Config{Etcd: client, Listen: "127.0.0.1:7420"})
//	defer c.Close()
//
// Package controller/state decides; this package carries out: it serves the RPCs, keeps
// the leadership, writes transactions and calls agents. No controller is on the data path.
// If all controllers are down, reads and writes continue until the leases end.
//
// # What keeps two leaders apart
//
// Every transaction is guarded by the leader's election key and by the previous
// revision of every record it changes: a deposed leader's write fails (hazard 14).
// Answers that need no write are given only before an instant until which the
// election key is known to be held.
//
// # Obligations of the caller
//
// The etcd client belongs to the caller, who closes it after Close. The package imports
// only etcd's client; internal/etcdembed starts an etcd inside the process.
package controller
