// Package local runs a cluster of separate processes on this host, from a quarry
// binary: controllers with an etcd inside, and storage nodes. The demo, the
// benchmark and the tests of the command use it.
//
//	c, err := local.Start(ctx, local.Config{Binary: exe, Nodes: 3})
//	defer c.Stop()
//	client.Connect(ctx, client.Config{Controllers: []string{c.URL}})
package local
