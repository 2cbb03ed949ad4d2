// Package state decides everything that a controller decides. It is a pure machine: time,
// randomness and results come in as events, what is to be done goes out as actions, and the
// same events always give the same actions.
//
//	m, err := state.New(config, term, now, records, random)
//	actions := m.Step(now, event)
//
// # A failover
//
// What happens when the node of a region's primary dies (docs/DESIGN.md#failover):
//
//	1  suspicion   late heartbeats, an unanswered call, complaints of clients, the pulse or
//	               the end of a connection make the node suspect             watch.go
//	2  loss        three probes in a row without the right answer: the node is lost.
//	               A node that answers is given up as well if it calls itself unfit, or
//	               if most clients cannot reach it                           sick.go
//	3  survivors   nothing is decided while any replica of the region is unsure. Each in-sync replica that
//	               is left must have answered a probe sent after the loss    epoch.go
//	4  new epoch   the lost replica goes OUT, the first in-sync one becomes primary, and
//	               the record becomes RECOVERING at epoch E. The region is exposed: no
//	               session counts as fenced in it, because the lost node may still execute
//	               verbs of the epoch that the others serve                  fence.go
//	5  close       each replica closes all epochs before E: their keys are dead, none of their
//	               verbs is still executing, and the region is no longer exposed. Then each
//	               node shows that it has the region's memory (HostRegion with MustExist)
//	6  wait        each session whose lease runs has acknowledged the table that says
//	               RECOVERING, or is gone; and these nodes have acknowledged each fence
//	               that is begun                                             wait.go
//	7  reconcile   the replicas open E, which no client asks for, because no table shows it
//	               OPEN. The primary's agent gets a ticket for it and makes the replicas alike
//	               (slab.Reconcile)
//	8  open        the replicas open E+1, the record becomes OPEN at E+1, and clients get
//	               it with a heartbeat or with their next error
//
// If a node changes meanwhile, the work ends and begins again with another epoch. Moves,
// drains, a rebuilt replica's first epoch and a change of primary go the same way from 4.
//
// The lost node is not fenced. Its replica does no harm: every commit needs the other replicas,
// whose keys are dead, every reader with a lease has acknowledged E, and the replica returns
// zeroed only.
//
// A node whose same incarnation answers again before step 4 keeps its replica. After it the replica is OUT, and
// returns only zeroed and rebuilt, even where its node has found the memory. If the nodes of all
// in-sync replicas have restarted, the replicas whose memory was found go on in a new epoch.
// If none was found and no silent node may have one, the region is LOST.
//
// # What a region shows
//
// The first that applies (condition.go): LOST, the memory of each in-sync replica is gone or
// was given up; UNAVAILABLE, no in-sync replica can be reached and one may come back;
// RECOVERING, from 4 to 8 above; DEGRADED, fewer replicas are in sync than wanted; OPEN.
//
// # Fences
//
// A fence of a session begins when it is closed or revoked; when the connection of its
// heartbeats and its last connection to some storage node have ended since its last
// heartbeat, or it has been silent for two leases; when its lease is over and a client
// waits for one of its reservations, or a region waits for it in step 6; and when it renews its lease and does
// not acknowledge the table for two leases, or a reclaim epoch for twenty. It is complete in
// a region when each replica that is not OUT has acknowledged it and the region is not
// exposed. The record of the session is FENCED when that is so in every region; until then it
// is FENCING, and regions where the fence is complete certify it all the same.
//
// # Grace periods
//
// A grace period is the time from the rise of the reclaim epoch until each session has
// acknowledged it, has left, or is fenced. After one, no operation from before is under way.
// It is needed before the number of a session is used again, before a block that was
// drained is looked through, and before it is zeroed.
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
// calls to agents, the table) is held back until its transaction has been committed. A leader
// that is deposed drops its machine with it; its successor starts from the records.
//
// # What lives where
//
// Committed: the cluster's uuid, ticket key and counters, its default number of replicas,
// the reclaim epoch, nodes, regions with the moves that are planned, and sessions with
// their serials (numbers that are never used again), also those that are fenced and not
// scrubbed. Not committed: leases, acknowledged revisions, heartbeats of nodes, calls under
// way.
//
// A new leader gives every session a whole lease before it may say that one has run out,
// takes a node for well only when it has registered again, and for lost when it does not
// answer three probes, registered or not. It owes every fence that
// is not complete again; begins another epoch for each region that is RECOVERING and has no lost
// or stale replica (the others go through 3 and 4), so that the epoch that its predecessor reconciled in is closed; undoes regions that were being
// created; and ends the sessions of regions that were being removed.
package state
