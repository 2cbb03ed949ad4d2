// Package slab is the slab protocol: Read, Update, Birth, Free, and what repairs, rebuilds
// and failovers do to slabs, as programs over rounds of one-sided verbs.
//
// A program waits only in calls of its Port. It reads no clock, draws no
// random number and starts no goroutine: these come in through Port. So the same code runs
// on real fabrics and, as a coroutine, in the simulator (verify/sim).
//
// The terms are those of docs/GLOSSARY.md.
//
// # What a slab holds
//
//	R   8 bytes: the reservation. 0, or the session that may change the slab, with a
//	    sequence number that makes the value unique within the session. The id of a session that is over
//	    rests, until no word and no program can name it, before another session has it. Only R of the primary counts.
//	V   8 bytes: state and version. LIVE@n: the object's value is the image of version n.
//	    FREE@n: there is no object. BAD@n: no replica had a whole image of the object. Readers get ErrCorrupt, and
//	    nobody allocates the slab until the mark is taken away (bad.go). On each replica.
//	2   places for images: payload, header (version, writer, born, length) and checksum.
//	    Version n is in place n mod 2, so the place that V does not name can be written
//	    while readers use the other one. A write-once slab (SINGLE) has one place.
//	    So has a STAGED slab, for home, with L in front of it: 8 bytes that lead to the record or
//	    shadow of the latest change. staged.go says how it is changed.
//
// # An Update, and the death of its client
//
// With replicas P (the primary), B1 and B2, and V = LIVE@6 everywhere, session 9 updates the
// object in three rounds (update.go, reserve.go, commit.go). The columns show R and V of
// the primary, and V of the backups, after each round:
//
//	round   verbs                                       P        B1       B2
//	1       P: CAS R 0 -> 9.1, READ the slab            9.1, 6   6        6
//	2       all: WRITE image 7; B1, B2: CAS V 6 -> 7    9.1, 6   7        7
//	3       P: CAS V 6 -> 7, then CAS R 9.1 -> 0        0,   7   7        7
//
// Readers READ at P, so they see image 6 until the CAS of V in round 3, and image 7 from
// then on: that CAS is the linearization point. The client may die between any two verbs:
//
//   - Before round 1 has taken effect nothing has changed.
//   - Between the CAS of R and the CAS of V at P, R names a dead session. When its
//     connections have ended, or its lease is over and another client waits, or it has been silent
//     for two leases, the controllers have every replica refuse its verbs, and certify that fence
//     (Port.HolderFenced). The next client that changes the slab takes R over with CAS R 9.1 -> its
//     own, and sets V of the backups back to V of P (takeover.go). The update was never seen, and
//     never will be once the slab is taken over: image 7 stays where it is, no V names it, and an
//     Update that finds it at P makes version 9 in its place (invariant 5). The scrub does the same for slabs that
//     no client asks for (scrub.go). If the epoch ends first, Reconcile may keep the update (below).
//   - After the CAS of V the update is done. R is still 9.1 if the client dies before its
//     last CAS; the takeover finds V alike everywhere and has nothing to roll back.
//
// # A change of epoch
//
// The loss, addition or removal of a replica and a change of primary end the region's epoch
// (the end of a rebuild does not), and with it every key: at the replicas of the new epoch no
// verb of the old one is executed any more. A replica that has left may still execute some.
// Round 2 of a commit needs the others. Round 3 may still complete at a primary that has left:
// then every replica that stayed has the new V, and Reconcile keeps it.
//
// An agent of the new primary compares the in-sync replicas: the highest V with a whole image
// wins, and all reservations are cleared (reconcile.go). If round 2 of the Update above had
// completed, 7 wins. If one backup of the new epoch has V = 7, 7 wins too. Otherwise 6 does.
// A client that is alive READs back which of the two it is (readBack), or answers
// ErrUnknown. A replica that is being rebuilt gets images from the copier (copier.go) and
// from clients, which write to it from the beginning of its epoch.
//
// # Open words
//
// In a region with open words V of all replicas is changed in one round, with a bit that says that the others may not have
// it yet, and the bit is taken off behind the answer. Every replica in sync can be read. open.go says how, and what takes the
// place of invariants 2 and 3.
//
// # A Read
//
// One READ at the primary brings V and image. The answer is given if the block's header has
// the generation of the reference (headers.go), if the image has a right checksum and the
// version that V names, if it was born with the reference's object, and if the session's
// lease still runs when the READ has completed: without a lease a failover need not wait for
// this session, and the primary that answered may have been replaced. R plays no part, so
// readers never wait. If V stands still and the image is wrong, it is damaged: the reader
// calls Repair, which takes the image from a backup under a reservation (repair.go).
//
// # Invariants
//
//  1. While an epoch is open, only the session that R of the primary names changes V of an
//     in-sync replica, and only while it is not fenced. On a rebuilding replica the copier
//     also moves V of a FREE slab forward.
//  2. While R of the primary is 0, V of every in-sync replica is the same, and names a whole
//     image or FREE. A takeover restores this before it does anything else.
//  3. V of the backups is changed before V of the primary. So no failover loses a value that
//     a reader has seen at the primary.
//  4. The image that V of a PAIR or SINGLE slab names is never changed: a writer that dies leaves the old value. Only
//     repairs and Reconcile write it, with the bytes that it has. Home of a STAGED slab is overwritten
//     by the image that V names by then; the record or shadow has it meanwhile (S1 and S2 in staged.go).
//  5. An Update never reuses the version of an image that a dead writer left at the primary
//     (nextVersion). Otherwise a slow READ could take the dead writer's whole image and then its
//     successor's V, and return a value that was never committed. A backup's leftover is rolled
//     back first and overwritten; readers do not look there. A Birth may repeat the version of
//     a dead birth: no reference to that one exists. In a PAIR slab the leftover's header shows its version, in
//     any epoch. In a STAGED slab L does, where a takeover or Reconcile has left it (S4).
//  6. A session that cannot settle what it has posted, or cannot make home whole, keeps its reservations and posts
//     nothing more (Lane.EndSession).
//
// # A CAS of V that fails
//
// Under invariant 1 the CAS of V of a commit finds the value that the holder has READ, or its own new one. Anything else is
// damaged memory, or a session that breaks the protocol: the attempt's outcome is unknown, and the session ends (invariantViolated). The verbs behind the
// CAS are executed all the same. In a STAGED chain home is then the new image under a V that names another one, as is its record, and
// R is released. That loses nothing: no READ could show the image of before under that V either. Readers get ErrCorrupt until
// the object is restored.
//
// V that is not valid is copied nowhere (rollBack), and nothing is committed on it; Reconcile goes by the other replicas.
//
// # Three answers
//
// nil: done. ErrUnknown: may have been done, at most once. Any other error: not done, and
// never will be. A program that cannot settle what it has posted ends its session, so that
// fence and scrub settle it: a live session leaves no reservations but its claims behind. A commit
// whose V is changed has been done, also where its session ends before home is written and R released.
//
// # Obligations of the caller
//
// A Lane belongs to one goroutine at a time. Payloads passed to callbacks are in the lane's
// scratch memory and are valid during the callback only.
//
// # Files
//
//	port.go lane.go object.go attempt.go     what a program needs and knows
//	read.go halves.go chunks.go              reads
//	update.go reserve.go commit.go birth.go  changes of one object
//	batch.go updatemany.go                   reads and changes of many objects
//	set.go setwrite.go                       several objects held at once
//	staged.go staging.go                     STAGED slabs
//	open.go late.go confirm.go               regions with open words
//	verbs.go                                 the chains of verbs, built in one place
//	takeover.go scrub.go orphan.go           what dead sessions leave
//	repair.go repairall.go                   damaged images
//	bad.go                                   objects that are lost
//	reconcile.go                             failover
//	copier.go copymany.go                    rebuilding a replica
package slab
