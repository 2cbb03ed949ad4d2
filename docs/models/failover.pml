/*
 * failover.pml: one slab on a primary and two backups, and a controller that removes
 * nodes, also nodes that are alive and still serve clients.
 *
 * What is proved: docs/DESIGN.md#failover with the rules of docs/DESIGN.md#operations
 * (Update, Read, one epoch per operation) and docs/DESIGN.md#sessions-and-fences (leases). See README.md for
 * bounds and results.
 *
 * A removed node does not learn of its removal: it keeps its keys and its words and serves
 * the clients that still have the old table. Between two steps of a client any time may
 * pass, so every verb may land late.
 *
 *   -DFAILS=n    nodes removed in all, also one during the recovery from the other (default 2)
 *   -DWRITERS=n  writers with one Update each (default 2)
 *   -DONE_CLIENT the writers are two operations of one session, whose lease never lapses
 *   -DNO_READER  leave out the reader, which never stops: then a state in which a writer
 *                waits for ever is an invalid end state
 *   -DCHECK_BEFORE  a Read checks the lease when it is called, not after its READ
 *   -DBUG_...    a deliberate mistake that the search must find
 *   -DWITNESS_...  a state that must be reachable, or the proof is empty
 */
#ifndef FAILS
#define FAILS 2
#endif
#ifndef WRITERS
#define WRITERS 2
#endif
#define N 3
#ifdef ONE_CLIENT
#define NS 2				/* both writers are operations of one session */
#define SESSION(w) 0
#define MAY_LAPSE(s) (s == 1)
#else
#define NS (WRITERS + 1)		/* the last session is the reader's */
#define SESSION(w) w
#define MAY_LAPSE(s) true
#endif
#define MAXV 12

byte V[N] = 2;
byte iv[2 * N], iw[2 * N];		/* images: version, writer; place 2n even, 2n+1 odd */
byte R[N];				/* used where the node is primary */
byte keys[N] = 1;			/* access keys of this epoch ... */
bit open[N] = 1;			/* ... which work */

/* The region's record, and the epochs before it, which clients may still use. */
byte epoch = 1;
byte members[FAILS + 2], primary[FAILS + 2];
#define IN(n, e)	(members[e] & (1 << (n)))

/* Sessions: the epoch acknowledged, the lease as the holder and as the granter sees it. */
byte table[NS] = 1;
bit hold[NS] = 1;
bit grant[NS] = 1;

/* Ghosts. */
byte floor = 2;				/* newest version that was acknowledged or read */
byte told[MAXV];			/* and its writer + 1 */
bit begun;

#define PLACE(n, ver)	(2 * (n) + ((ver) & 1))

/* A node refuses keys that it has rotated. A client repeats a verb whose keys do not work
 * yet, unless it has meanwhile learned of another epoch. */
#ifdef BUG_NO_KEY_ROTATION
#define OK(n)		((keys[n] == e && open[n]) || keys[n] > e)
#define REFUSED(n)	(!OK(n) && table[s] != e)
#else
#define OK(n)		(keys[n] == e && open[n])
#define REFUSED(n)	(keys[n] > e || (!OK(n) && table[s] != e))
#endif
#define CURRENT		(hold[s] && table[s] == e)

inline tell(ver, who) {
	assert(told[ver] == 0 || told[ver] == who + 1);
	told[ver] = who + 1;
	if
	:: ver > floor -> floor = ver
	:: else
	fi
}

/* A backup's WRITE and CAS V are one step here; takeover.pml takes them apart. */
#define CHAIN(x) \
	:: atomic { pos[x] && OK(x) -> \
		iv[PLACE(x, n)] = n; iw[PLACE(x, n)] = w + 1; \
		if \
		:: x != p -> FLIP_FINDS(x); V[x] = n \
		:: else \
		fi; \
		pos[x] = 0 } \
	:: atomic { pos[x] && REFUSED(x) -> pos[x] = 0; refused = 1 }
#define FLIP_FINDS(x)	assert(V[x] == v || V[x] == n)

proctype Writer(byte s, w) {
	byte e, p, v, n, low;
	bit pos[N];
	bit refused;

begin:
	atomic {
		(w == 0 || begun) -> begun = 1;
		v = 0; n = 0;
		e = table[s]; p = primary[e]; low = floor };
	/* Step 1: CAS R 0 -> s, READ. */
	atomic {
		if
		:: OK(p) && R[p] == 0 -> R[p] = w + 1
		:: REFUSED(p) || table[s] != e -> goto begin
		fi };
	atomic {
		if
		:: OK(p) -> v = V[p]; n = v + 1;
			if
			:: iv[PLACE(p, n)] >= n -> n = iv[PLACE(p, n)] + 2
			:: else
			fi;
			assert(n < MAXV)
		:: REFUSED(p) -> goto begin
		fi };
	/* f gets the data only under the lease and the epoch that it was read in. */
	atomic {
		if
#ifndef BUG_UPDATE_UNCHECKED
		:: !CURRENT -> goto begin
		:: CURRENT ->
#else
		:: true ->
#endif
			assert(v >= low); low = 0;
			pos[0] = 1 && IN(0, e); pos[1] = 1 && IN(1, e); pos[2] = 1 && IN(2, e)
		fi };
	/* Step 2: WRITE everywhere, CAS V at the backups. */
	do
	CHAIN(0)
	CHAIN(1)
	CHAIN(2)
	:: atomic { pos[0] == 0 && pos[1] == 0 && pos[2] == 0 -> break }
	od;
#ifndef BUG_REFUSED_COUNTS
	if
	:: atomic { refused -> goto finish }		/* ErrUnknown */
	:: atomic { !refused -> skip }
	fi;
#endif
	/* Step 3: CAS V, answer, CAS R. */
	atomic {
		if
		:: OK(p) -> FLIP_FINDS(p); V[p] = n	/* linearizes here, or at the reconcile */
		:: REFUSED(p) -> goto finish		/* ErrUnknown */
		fi };
	/* No check of the lease: every replica of the epoch took it. */
	atomic {
#ifdef WITNESS_ACK_AFTER_REMOVAL
		assert(epoch < 3 || e < 2 || floor < 3);
#endif
		tell(n, w + 1) };
	atomic {
		if
		:: OK(p) -> assert(R[p] == w + 1); R[p] = 0
		:: REFUSED(p)
		fi };
finish:
	atomic { e = 0; p = 0; v = 0; n = 0; low = 0; refused = 0 }
}

proctype Reader(byte s) {
	byte e, ver, who, low;
end_begin:
	do
	:: atomic {
#ifdef CHECK_BEFORE
		hold[s] ->
#endif
		e = table[s]; low = floor };
	   atomic {
		if
		:: OK(primary[e]) ->
			ver = V[primary[e]]; who = iw[PLACE(primary[e], ver)];
			assert(iv[PLACE(primary[e], ver)] == ver)
		:: REFUSED(primary[e]) -> goto again
		fi };
#if defined(BUG_NO_LEASE_CHECK) || defined(CHECK_BEFORE)
	   /* No lease check after the READ. */
#elif defined(BUG_NO_EPOCH_CHECK)
	   /* The lease may be newer than the one that the READ was posted under. */
	   if
	   :: atomic { !hold[s] -> goto again }
	   :: atomic { hold[s] -> skip }
	   fi;
#else
	   if
	   :: atomic { !CURRENT -> goto again }
	   :: atomic { CURRENT -> skip }
	   fi;
#endif
	   /* A pause here is harmless: the READ lies between call and return. */
	   atomic {
		assert(ver >= low);
#ifdef WITNESS_READ_LAST
		assert(!(e == 3 && ver > 3));
#endif
		tell(ver, who) };
again:
	   atomic { e = 0; ver = 0; who = 0; low = 0 }
	od
}

/* A session acknowledges a new epoch, or its lease ends: first at the holder, later at the
 * granter, and some time after that there is a new session with the present table. Only a
 * session that has not acknowledged loses its lease here. What an ended session leaves
 * behind within an epoch is the subject of takeover.pml. */
proctype Heartbeat(byte s) {
end_beat:
	do
	:: atomic { hold[s] && table[s] < epoch -> table[s] = epoch }
	:: atomic { hold[s] && table[s] < epoch && MAY_LAPSE(s) -> hold[s] = 0 }
	:: atomic { !hold[s] && grant[s] -> grant[s] = 0 }
	:: atomic { !hold[s] && !grant[s] -> table[s] = epoch; hold[s] = 1; grant[s] = 1 }
	od
}

#define AGREED(s)	(table[s] == epoch || !grant[s])
#ifdef NO_READER
#define ALL_AGREED	(AGREED(0) && AGREED(NS - 2))
#else
#define ALL_AGREED	(AGREED(0) && AGREED(1) && AGREED(NS - 1))
#endif
#define MEMBER(n)	IN(n, epoch)
#define REMOVE(x) \
	:: atomic { MEMBER(x) && members[epoch] != (1 << (x)) && (epoch > 1 || x != 2) -> \
		members[epoch + 1] = members[epoch] & ~(1 << (x)) }
#define PRIMARY(x) \
	:: atomic { (members[epoch + 1] & (1 << (x))) && (members[epoch + 1] != 6 || x == 1) -> \
		primary[epoch + 1] = x; epoch++ }
#define ROTATE(x) \
	:: atomic { MEMBER(x) && keys[x] != epoch -> keys[x] = epoch; open[x] = 0 }
#define ROTATED(x)	(!MEMBER(x) || keys[x] == epoch)
#ifdef BUG_RESERVATIONS_KEPT
#define CLEAR(x)	skip
#else
#define CLEAR(x)	R[x] = 0
#endif
/* Image first, then V: the next failover may come between. */
#ifdef BUG_NO_RECONCILE
#define RECONCILE(x) \
	:: atomic { MEMBER(x) && todo[x] == 2 -> todo[x] = 0; CLEAR(x) }
#else
#define RECONCILE(x) \
	:: atomic { MEMBER(x) && todo[x] == 2 -> \
		iv[PLACE(x, best)] = best; iw[PLACE(x, best)] = by; todo[x] = 1 } \
	:: atomic { MEMBER(x) && todo[x] == 1 -> V[x] = best; CLEAR(x); todo[x] = 0 }
#endif
#define OPEN(x) \
	:: atomic { MEMBER(x) && !open[x] -> open[x] = 1 }
#define IS_OPEN(x)	(!MEMBER(x) || open[x])
#define HIGHER(x) \
	if \
	:: MEMBER(x) && V[x] > best -> best = V[x]; by = iw[PLACE(x, V[x])] \
	:: MEMBER(x) && V[x] == best -> assert(by == iw[PLACE(x, V[x])])	/* ties cannot differ */ \
	:: else \
	fi

proctype Controller() {
	byte best, by;
	byte todo[N];

another:
	atomic { best = 0; by = 0; todo[0] = 0; todo[1] = 0; todo[2] = 0 };
	/* 1. New epoch, one node removed; any survivor is the primary. Nodes 1 and 2 are
	 * alike until the first removal, so only node 1 leaves or becomes primary then. */
	if
	REMOVE(0)
	REMOVE(1)
#if FAILS > 1
	REMOVE(2)
#endif
	fi;
	if
	PRIMARY(0)
	PRIMARY(1)
	PRIMARY(2)
	fi;
	/* 2. Survivors rotate their keys. */
	do
	ROTATE(0)
	ROTATE(1)
	ROTATE(2)
	:: atomic { ROTATED(0) && ROTATED(1) && ROTATED(2) -> break }
	:: epoch <= FAILS -> goto another
	od;
	/* 3. Every session has agreed, or its lease has run out. */
#ifndef BUG_NO_LEASE_WAIT
	if
	:: ALL_AGREED
	:: epoch <= FAILS -> goto another
	fi;
#endif
	/* 4. Reconcile: the highest V wins. No acknowledged write is lost. */
	atomic {
		HIGHER(0);
		HIGHER(1);
		HIGHER(2);
#ifndef BUG_NO_RECONCILE
		assert(best >= floor);
		assert(told[best] == 0 || told[best] == by + 1);
#endif
		todo[0] = (MEMBER(0) -> 2 : 0);
		todo[1] = (MEMBER(1) -> 2 : 0);
		todo[2] = (MEMBER(2) -> 2 : 0)
	}
	do
	RECONCILE(0)
	RECONCILE(1)
	RECONCILE(2)
	:: atomic { todo[0] == 0 && todo[1] == 0 && todo[2] == 0 -> break }
	:: epoch <= FAILS -> goto another
	od;
	atomic { best = 0; by = 0 };
	/* 5. Open. */
	do
	OPEN(0)
	OPEN(1)
	OPEN(2)
	:: atomic { IS_OPEN(0) && IS_OPEN(1) && IS_OPEN(2) -> break }
	:: epoch <= FAILS -> goto another
	od;
	if
	:: epoch <= FAILS -> goto another
	:: true
	fi
}

init {
	byte i;
	atomic {
		do
		:: i < N -> iv[2 * i] = 2; iv[2 * i + 1] = 1; i++
		:: else -> break
		od;
		i = 0;
		members[1] = 7; primary[1] = 0;
		told[2] = 1;
		do
		:: i < WRITERS -> run Writer(SESSION(i), i); i++
		:: else -> break
		od;
		i = 0;
		do
		:: i < NS - 1 -> run Heartbeat(i); i++
		:: else -> break
		od;
#ifndef NO_READER
		run Reader(NS - 1); run Heartbeat(NS - 1);
#endif
		run Controller();
		i = 0
	}
}
