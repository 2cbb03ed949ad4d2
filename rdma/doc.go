// Package rdma is the fabric: one-sided verbs on remote memory, posted in chains
// and awaited in rounds, the same over every provider.
//
//	verbs    libibverbs and librdmacm          rdma/verbs
//	tcp      sockets, works between hosts      rdma/tcp
//	shm      the region mapped into the client rdma/shm
//	inproc   client and node in one process    rdma/shm
//	sim      seeded, hostile, for proofs       rdma/sim
//
// tcp, shm and inproc have their responder in common: rdma/host. What every
// provider must do is written as tests: rdma/rdmatest.
//
// # Chains and rounds
//
// A Chain is a list of verbs for one memory window over one connection. It is
// posted at once, executed by the responder in order and answered together. A
// Round is a set of chains on different connections, posted together and awaited
// together: one network round trip. Do is the only call that waits.
//
// # What order means
//
//   - Everything behind a WRITE is ordered after it; a READ is ordered after anything.
//   - A WRITE, CAS, FETCH_ADD or FLUSH behind a READ, an atomic or a FLUSH is
//     ordered after it only with Verb.Fence set, on it or on a verb between the two.
//   - A failed CAS does not stop the chain.
//   - Nothing above 8 aligned bytes is atomic. A READ may see any mixture of two
//     WRITEs, in any order of lines; a WRITE cut short leaves any subset of its lines.
//
// # Obligations of the caller
//
//  1. A word that is ever the target of a CAS is the target of a WRITE only while no other
//     session has keys of the region: a reconcile and the zeroing of a block store it plainly.
//  2. A Conn belongs to one goroutine at a time: give each its own lane.
//  3. Buffers come from Buffers.Alloc: a device must be able to reach them.
//     They are not touched between Post and the return of Wait.
//  4. A chain whose Err wraps ErrBroken has an unknown outcome: its verbs may have
//     run, or may still run, until Reset of its connection has returned nil.
//  5. Nothing that must not happen late is guarded by time: only the responder
//     stops verbs (revocation, rotation of keys).
//
// The verbs are those of US 2017/0149890 [0003]; the order is that of reliable
// connected queue pairs, InfiniBand Architecture Specification volume 1, 10.8.3.3.
package rdma
