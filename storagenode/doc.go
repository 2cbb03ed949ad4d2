// Package storagenode hosts regions: it maps their memory, opens and closes access
// to it for sessions, and carries out the commands of its cluster's controllers. On the data path
// it takes no decision: clients reach the memory through the fabric.
//
//	n, err := storagenode.Start(ctx, storagenode.Config{
//		Controllers: []string{"http://127.0.0.1:7420"}, Name: "a", FailureDomain: "/dc1/r1/a",
//	})
//	defer n.Close()
//
// Package storagenode/state decides which commands are obeyed; this package carries out its actions
// on memory, files and the fabric.
//
// # Obligations of the caller
//
// A folder or a device belongs to one node: it is locked. A node that restarts finds the memory
// of its regions, reports them, and serves none of them before a controller has
// opened it under a new epoch.
package storagenode
