// Package sim runs the protocol under one seeded scheduler, on a fabric that delays, reorders
// and loses verbs and answers as the contract of package rdma allows.
//
// Clients are coroutines that run the programs of slab and alloc on ports of package sim. The
// fabric is rdma/sim. Controllers and agents are the state machines of controller/state and
// storagenode/state; etcd and the messages between all of them are simulated. Time is virtual,
// and each clock has a rate of its own. A run does not depend on Go's scheduler, the wall clock
// or the order of a map: the same options give the same digest.
//
// With Options.Sets clients hold several objects at once: see sets.
// With Options.Tree the clients work on one B-tree of package btree, whose nodes they
// allocate, update and free: see tree. Many schedules have a second region: see far. With
// Options.Batches clients read and write several objects in one call: see batches. With
// Options.Operator an operator creates regions and gives nodes up: see orders. With
// Options.Lanes clients share sessions, as the lanes of a process do: see lanes. With
// Options.Adapters nodes have two adapters, and lose one: see adapters.
//
// # Choices
//
// Every decision of a run is a choice: a number below n, where 0 is the least disruptive.
// A run is determined by its list of choices. Shrink looks for a shorter failing list, and
// for one with more zeros.
//
// # Checks
//
// At every verb: at most one holder of a slab is not fenced, V at the primary does not fall
// within an epoch, no verb of a session runs after the certificate of its fence, a committed
// image is whole on every in-sync replica, and the active image is not written. At the end,
// when all faults are over and a scrub has run: replicas are alike, nothing has leaked, and
// the history of each object is linearizable. A tree is well-formed, the history of each key
// is linearizable, and objects that dead clients have not linked can be collected.
package sim
