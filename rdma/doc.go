// Package rdma is the fabric: one-sided verbs on remote memory, posted in chains
// and awaited in rounds, the same over every provider.
//
//	verbs    libibverbs and librdmacm          rdma/verbs
//	tcp      sockets, works between hosts      rdma/tcp
//	shm      the region mapped into the client rdma/shm
//	inproc   client and node in one process    rdma/shm
//	sim      seeded, hostile, for proofs       rdma/sim
//
// Package rdma/msg carries calls to a node over these verbs.
//
// tcp, shm and inproc have their responder in common: rdma/host. What every
// provider must do is written as tests: rdma/rdmatest.
//
// # Terms
//
//	verb        READ, WRITE, CAS, FETCH_ADD, FLUSH or VERIFY: one operation on the memory of a node,
//	            which the node's processors need not take part in (Verb)
//	window      the right to a region's memory on one node, in one epoch (Window)
//	connection  one lane's link to one node, such as a queue pair (Conn)
//	responder   what executes the verbs: an adapter, the node's server, or the client's own processor
//	chain       verbs for one window over one connection: posted at once, executed in order,
//	            answered together (Chain)
//	round       chains over different connections, posted together and awaited together: one
//	            network round trip (Round). Do is the only call that waits
//
// # Order within a chain
//
// Read the table as: the verb in the row, if it stands behind the verb in the column, executes
// after that verb has executed.
//
//	                          behind a WRITE   behind a READ, VERIFY, CAS, FETCH_ADD or FLUSH
//	READ, VERIFY              yes              yes
//	WRITE                     yes              only with a fence
//	CAS, FETCH_ADD, FLUSH     yes              only with a fence
//
// A fence (Verb.Fence) on a verb makes that verb, and every verb behind it, execute after all
// READs, VERIFYs, atomics and FLUSHes before it. So it may also stand on a verb between the two.
//
//   - A CAS that finds another value than it expects does not stop the chain.
//   - Only aligned words of 8 bytes are atomic. A READ that overlaps in time with WRITEs may return
//     any mixture of the old and new words, whatever their order in memory. A WRITE that a
//     broken connection cuts short leaves any subset of its cache lines written.
//   - A VERIFY answers the hash of bytes that a READ in its place might have returned. No adapter has the
//     verb: over verbs the node's processors carry it out for a message on the queue pair. See Window.Verifies.
//   - There is no order between chains over different connections.
//
// # Obligations of the caller
//
//  1. A word that is changed by CAS is stored by WRITE only while no verb of another session can
//     reach it: a reconcile has the only keys of its region, and a reclaimed block is zeroed
//     after a grace period.
//  2. One goroutine at a time uses a Conn. Every lane has its own.
//  3. Buffers come from Buffers.Alloc: a device must be able to reach them.
//     They are not touched between Post and the return of Wait.
//  4. A chain whose Err wraps ErrBroken has an unknown outcome: its verbs may have
//     run, or may still run, until Reset of its connection has returned nil.
//  5. Time stops no verb. Where a verb must not take effect later, the responder has to refuse it:
//     by a fence of the session, or because the region's keys have changed.
//
// The verbs are those of US 2017/0149890 [0003]; the order is that of reliable
// connected queue pairs, InfiniBand Architecture Specification volume 1, 10.8.3.3.
package rdma
