// Package state decides everything that a controller decides. It is a pure
// machine: time, randomness and results come in as events, what is to be done goes
// out as actions, and the same events always give the same actions.
//
//	m, err := state.New(config, term, now, records, random)
//	actions := m.Step(now, event)
//
// # Obligations of the caller
//
//  1. Steps are taken by one goroutine at a time, with a now that never falls.
//  2. A Commit is one transaction: it takes effect only if the caller still leads
//     and every key is at its previous revision. Its outcome comes back as
//     Committed or, whenever it is not certain, as Failed. One is out at a time.
//  3. Actions are carried out in the order given. Calls may be answered in any
//     order; every Call is answered by exactly one Reply, at the latest when its
//     time is up.
//  4. Every Ask is answered by exactly one Answer, unless it is cancelled or the
//     machine has said StepDown: then nobody is answered any more and the caller
//     tells all who wait that the outcome is unknown.
//  5. Lead is given again and again with the instant until which nobody else can
//     lead. Behind it the machine answers nobody.
//  6. A Tick comes about every TickEvery.
//
// # How changes become visible
//
// A step changes the machine's records at once, and says so to nobody: whatever
// follows from a change (answers, calls to agents, the table) is held back until
// the transaction that holds the change has been committed. A leader that loses
// its place loses the machine with it; its successor starts from the records.
//
// # What lives where
//
// Committed: the cluster's uuid, ticket key and counters, nodes, regions, sessions
// with their serials, also the fenced ones. Not committed: leases, acknowledged
// revisions, heartbeats of nodes, calls under way. A new leader gives every session
// a whole lease before it may say that one has run out, makes every node register
// again, and carries on with fences and configurations found half done.
package state
