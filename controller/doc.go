// Package controller is the control plane of a cluster: sessions and their
// leases, the distribution table, the placement library. State lives in etcd; one
// controller leads, any number stand by.
//
//	c, err := controller.Start(ctx, controller.Config{Etcd: client, Listen: "127.0.0.1:7420"})
//	defer c.Close()
//
// Package controller/state makes the decisions. This package carries them out: it serves the
// RPCs, keeps the leadership, writes transactions and calls agents. No controller is on the data
// path. If all controllers are down, reads and writes continue until the leases end.
//
// # One leadership
//
//	campaign.go   campaigns in etcd, leads, and campaigns again                (Controller.campaign)
//	term.go       one leadership: steps the machine, carries out its actions   (term.run)
//	service.go    RPCs: checks the caller, then passes the request to the machine (do)
//	depose.go     standbys end the leadership of a leader that does not answer
//	elect.go      campaigns of the etcd members inside the controllers
//	pulse.go      the controller's part in the pulse, the cluster's failure detector
//
// The goroutine of term.run alone steps the machine. An RPC sends it an event and waits for the answer.
//
// # What keeps two leaders apart
//
// Every transaction is guarded by the leader's election key and by the previous
// revision of every record it changes: a deposed leader's write fails (hazard 14).
// An answer that needs no write is given only before an instant until which no other
// controller can lead: the leader knows that instant from its last read of the election key.
//
// # Obligations of the caller
//
// The etcd client belongs to the caller, who closes it after Close. The package imports
// only etcd's client; internal/etcdembed starts an etcd inside the process.
package controller
