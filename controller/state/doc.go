// Package state decides everything that a controller decides. It is a pure machine: time,
// randomness and results come in as events, what is to be done goes out as actions, and the
// same events always give the same actions.
//
//	m, err := state.New(config, term, now, records, random)
//	actions := m.Step(now, event)
//
// # A failover
//
// What happens when the node of a region's primary dies (docs/DESIGN.md#failover). Steps 1 and 2
// concern the node, the others each region that has a replica there:
//
//	1  suspicion   late heartbeats, an unanswered call, complaints of clients, the pulse or
//	               the end of a connection make the node suspect, and it is probed  watch.go
//	2  loss        three probes in a row without the right answer, 10 ms apart where its host
//	               refuses the connection: the node is lost, and its replicas are missing
//	                                                                             watch.go
//	3  survivors   every in-sync replica that is to stay must answer a probe that was sent
//	               after the loss was known. The region waits as long as any replica is
//	               unsure                                                        epoch.go
//	4  epoch E     the lost replica goes OUT, the first in-sync one that stays becomes the primary, and
//	               the record becomes RECOVERING at epoch E. The region is exposed from now on
//	               (see Fences)                                                  epoch.go
//	5  close       each replica closes all epochs before E: their keys are dead, and none of
//	               their verbs is still executing. The region is no longer exposed. Then
//	               each node confirms that it has the region's memory (HostRegion with
//	               MustExist: the agent refuses rather than make new memory)
//	6  wait        for two things: each session whose lease runs has acknowledged the table
//	               that says RECOVERING; and these nodes have acknowledged each fence that
//	               had begun when the table was acknowledged and the memory confirmed  wait.go
//	7  reconcile   the replicas open E. No client has keys of it, because no table shows it
//	               OPEN. The primary's agent gets a ticket for it and makes the replicas alike
//	               (slab.Reconcile)
//	8  open        the replicas open E+1, the record becomes OPEN at E+1, and clients get
//	               it with a heartbeat or with their next error
//
// If the health of one of these nodes changes meanwhile, the work ends and begins again with
// step 3 and a further epoch. Moves, drains, a rebuilding replica's first epoch and a change of
// primary need no loss, and begin with step 4.
//
// A node that has lost one of its adapters, and has ended what that one served, keeps its replicas: the
// regions of the adapter begin with step 4 too, with another adapter of the node (adapters.go).
//
// Two kinds of replicas need no probes to be left out. Those of a node that has registered
// with another incarnation, or that an operator has removed, are stale at once: they may have
// missed writes. Nodes that answer probes and call themselves unfit, or that most clients cannot
// reach, are given up as if they were lost (sick.go).
//
// The lost node gets no fence calls for this, and may still execute verbs of the old epoch. They
// do no harm: every commit needs the other replicas, whose keys are dead, every reader with a
// lease has acknowledged E, and the replica comes back zeroed only.
//
// A lost node whose same incarnation answers again before step 4 keeps its replica. After step 4
// the replica is OUT, and returns only zeroed and rebuilt, even where its node has found the
// memory again. If the nodes of all in-sync replicas have restarted, the replicas whose memory
// was found continue in a new epoch. If none was found, and no node that is silent may have
// one, the region is LOST.
//
// # What a region shows
//
// The first that applies (condition.go): LOST, the memory of each in-sync replica is gone or
// was given up; UNAVAILABLE, no in-sync replica can be reached and one may come back;
// RECOVERING, from 4 to 8 above; DEGRADED, fewer replicas are in sync than wanted; OPEN.
//
// # Fences
//
// A fence ends a session at the memory: when a node has acknowledged it, no verb of the session
// changes a byte there. The machine begins the fence of a session
//
//   - when its client closes it, or it is revoked;
//   - when two connections have ended since its last heartbeat: the one over which that heartbeat
//     came, and its last one to some storage node;
//   - when it has been silent for two leases;
//   - when its lease is over, and a client waits for one of its reservations or a region waits for it
//     in step 6;
//   - when it renews its lease, and does not acknowledge the table for two leases, or a reclaim epoch
//     for twenty.
//
// The fence is complete in a region when each replica that is not OUT has acknowledged it and the
// region is not exposed. A region is exposed from step 4 to the end of step 5 (and from when the node
// of one of its replicas registers with another incarnation, or is removed by force): the replica that
// is left out, or the former incarnation, may still execute verbs of the epoch that the others serve. A
// certificate is given for one region, as soon as the fence is complete there. With it a client takes over
// reservations of the session (slab).
//
// The record of a session is "live", then "fencing", and "fenced" when the fence is complete in every region. Then
// scrubs visit all regions and settle what the session has left (scrub.go); after a grace period the record
// is deleted, and the session's number may be used again. A session that its client has closed is "closing" in place of
// these two: it has left nothing, so its fence waits for no lost node, and it needs no scrub (rest.go).
//
// # Grace periods
//
// A grace period is the time from the rise of the reclaim epoch until each session has
// acknowledged it, has left, or is fenced. After it, no operation that began before the rise is
// under way. It is needed before the number of a session is used again, before a block that was
// drained is searched for slabs in use, and before that block is zeroed.
//
// # Obligations of the caller
//
//  1. Steps are taken by one goroutine at a time, with a now that never falls.
//  2. A Commit is one transaction: it takes effect only if the caller still leads
//     and every key is at its previous revision. Its outcome comes back as
//     Committed or, whenever it is not certain, as Failed. At most one Commit is without an
//     outcome.
//  3. Actions are carried out in the order given. Calls may be answered in any
//     order; every Call is answered by exactly one Reply, at the latest when its
//     time is up.
//  4. Every Ask is answered by exactly one Answer, unless the machine has said StepDown:
//     then there are no more answers, and the caller answers all requests that the outcome
//     is unknown. A canceled Ask may be answered still, and the caller drops that answer.
//  5. Lead is given again and again with the instant until which no other controller can
//     lead. After that instant new Asks are refused with NotLeader.
//  6. A Tick comes about every TickEvery, or every CalmTick while nothing is going on.
//
// # How changes become visible
//
// A step changes the machine's records at once. Everything that would show the change (answers,
// calls to agents, the table) is held back until its transaction has been committed. When a leader
// is deposed its machine is dropped; the successor starts from the committed records.
//
// # What is committed and what is not
//
// Committed: the cluster's uuid, its signing keys and counters, its default number of replicas,
// the reclaim epoch, tenants, nodes, regions with the moves that are planned, and sessions with
// their serials (numbers that are never used again), also those that are fenced and not
// scrubbed. Not committed: leases, acknowledged revisions, heartbeats of nodes, calls under
// way.
//
// A new leader therefore begins so:
//
//   - It gives every session a whole lease before it may say that one has run out.
//   - It takes a node for well only when the node has registered again, and for lost when the node
//     does not answer three probes, registered or not.
//   - It tells every node every fence that is not complete.
//   - A region that is RECOVERING gets another epoch, so that the epoch in which its predecessor
//     reconciled is closed. One with a lost or stale replica goes through steps 3 and 4.
//   - It removes regions whose creation was not committed, and ends the sessions of regions that were
//     being removed.
package state
