// Package pool keeps a copy of a program's memory in a cluster: a pool is as large as the local memory, and the program sends it the ranges that it
// has changed. The nouns are those of librpmem: create, open, close, remove, persist, deep persist, read and attributes (P. Szymanski, Persistent
// Memory over Fabric, SDC 2017, "RPMEM Library API").
//
//	local memory   0 ........ off ... off+n ........ size
//	                           | Persist(off, n)
//	pool           0 ........ off ... off+n ........ size   at every replica
//
// A pool consists of a name of the placement library, whose object has the size and the attributes, and a space (package space). All bytes of a pool
// are the program's. In place of librpmem's lanes, a Pool may be used by as many goroutines as its Client has lanes (client.Config.Lanes).
//
// # Order
//
// Persist sends a range to all replicas in one round for each MiB, and returns when they have it: in durable pools on stable storage. What a Persist
// has acknowledged survives the loss of all replicas but one. A Persist that begins behind the answer of another one is never found in the pool
// without that one. So a program that makes its memory consistent after a crash by the order of its flushes, as one with an undo log does, can do
// the same with the pool. A range is not atomic: of a Persist that was not acknowledged any of the bytes may be there.
//
// # One owner
//
// Create and Open make the session of the Client the owner of the pool, by one change of the name's entry. Others are refused while that session
// lives (ErrOpen). If it ends without Close, Open succeeds as soon as it is fenced: no verb of the former owner changes a byte then. All calls
// of a Pool whose session has ended fail with client.ErrFenced.
//
// Invariant: at most one session writes a pool. Each write of a Pool is bound to the session that the entry names (client.Client.Bind), and the
// entry names another one only when the former one has closed the pool or is fenced.
//
// # After a crash
//
// A pool that was not closed is Dirty when it is opened: it may lack changes, and its replicas may differ where a Persist was running. Sync makes the
// pool as the local memory is, and Restore makes the local memory as the pool is. Both compare hashes of all replicas, move what differs, and leave all
// replicas alike.
//
// # Other clusters
//
// A Host is a machine that reaches another cluster. A pool agent there, started by ssh, opens a pool as a client of that cluster, for the program, whose Remote sends it
// what is to be persisted. frame.go has their protocol. The agent's session is the owner; when the stream between the two ends, the agent closes the pool behind the operations that it has
// begun. If a call is given up while its request is under way, the Remote ends the stream.
//
// # Sets
//
// A Set, read from a poolset file, names a file that is the program's memory, its local part, and what that is replicated to: pools and mirrors. Open maps the
// file and gives a Memory. Its Persist flushes the local part first, so that the local part has everything that a replica has; with a queue the replicas
// get copies in the order of the calls.
//
// The header of the local part, that of each mirror and the name's entry of each pool have the token of the last owner. A local part whose token a replica has is
// the newest, and may overwrite it. Each Open makes another token, and writes it first into the local part's header as the next one, then into the replicas, then
// as the present one: at each moment the local part knows the token of its replicas. The token of an Open that has not returned is not used again. The header names
// its file, too, because a copy of a part has the same token, and lacks what was persisted later under that; where a loss of power takes what was flushed it names the
// start of the machine.
//
// A replica is torn while a Sync of it runs, and when a Persist has failed there: it may have later ranges and lack earlier ones.
package pool
