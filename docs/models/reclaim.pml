/*
 * reclaim.pml: one block of memory that changes its size class under two clients.
 *
 * What is proved: docs/DESIGN.md#operations (header first, Alloc, Birth, Free, block reclaim)
 * with the grace periods of a reclaim. See README.md for bounds and results.
 *
 * The block is two cells long. Class 1 cuts it into two slabs of one cell, class 2
 * into one slab that covers both. R and V of a slab are in its first cell, so the CAS of
 * a client that assumes the wrong class hits the words, or the payload, of another slab.
 *
 * A worker is a client's operations, one at a time, and their connections: between
 * two of its steps any time may pass, so every verb may land late.
 *
 *   -DSESSIONS=n   2: two clients (default). 1: two workers of one client, which share
 *                  the header cache, so that one works while the other is acknowledged
 *   -DNOBJ=n       objects born in all (default 2)
 *   -DNREC=n       reclaims tried (default 2)
 *   -DFENCE        one of the two clients may be fenced at any moment (run pan with -E)
 *   -DHINTS        a claim may start from a header copy of any age, not only from the cache
 *   -DONLY_DAMAGE  leave out the rule about where a verb may land, so that a bug shows
 *                  only when an object is lost or two share memory or a name
 *   -DBUG_...      a deliberate mistake that the search must find
 *   -DWITNESS_...  a state that must be reachable, or the proof is empty
 */
#ifndef SESSIONS
#define SESSIONS 2
#endif
#ifndef NOBJ
#define NOBJ 2
#endif
#ifndef NREC
#define NREC 2
#endif

#define S	(w % SESSIONS)		/* the session of worker w */

/* Block header: one word, so always changed and read in one step. */
#define H_FREE		0
#define H_FORMATTING	1
#define H_ACTIVE	2
#define H_DRAINING	3
#define H_RECLAIM	4
byte hstate = H_FREE, hclass = 0, hgen = 0, hsession = 0;

bit map[2];				/* free-slab map: 1 = taken */
byte R[2];				/* worker + 1, 0 = not reserved */
bit live[2];				/* V.state */
byte ver[2];				/* V.version */

/* Header cache of a session; what a worker claimed or kept. */
bit cvalid[2]; byte cstate[2], cclass[2], cgen[2];
byte mag[2], magclass[2], maggen[2];	/* cell + 1, 0 = none */
#ifdef HINTS
byte hintclass[2], hintgen[2];
#endif

/* Reclaim epochs. */
byte wanted, learned[2], acked[2];
bit busy[2], old[2];			/* in an operation; in one begun before `learned` */
bit fenced[2];
bit started;				/* the workers are alike: 0 goes first */

/* Ghosts. */
#define COMMITTED	1
#define RETURNED	2
#define FREED		3
byte births;				/* Births begun, to bound the search */
byte nobj, oclass[NOBJ], ocell[NOBJ], ogen[NOBJ], oborn[NOBJ], ostate[NOBJ];
bit passed2;				/* the second pass is complete */
byte reused;				/* formats after a reclaim */

#ifdef ONLY_DAMAGE
#define RULE(x)	true
#else
#define RULE(x)	(x)
#endif

/* A verb on a slab of class c and generation g. It may still land while RECLAIM waits
 * for its second grace period: the reclaim zeroes that memory afterwards. */
#define LANDS(c, g) assert(RULE(hclass == (c) && (((hstate == H_ACTIVE || hstate == H_DRAINING) && hgen == (g)) \
	|| (hstate == H_RECLAIM && !passed2))))

#define RUNS	(!fenced[S])

inline bear(cell, c, g) {
	/* A Ref is (address, generation, born) and names one object for ever. */
	i = 0;
	do
	:: i < nobj ->
		assert(ocell[i] != cell || ogen[i] != g || oborn[i] != ver[cell]);
		/* No two living objects overlap. */
		assert(ostate[i] == FREED || (ocell[i] != cell && oclass[i] == 1 && c == 1));
		i++
	:: else -> break
	od;
	assert(nobj < NOBJ);
	oclass[nobj] = c; ocell[nobj] = cell; ogen[nobj] = g; oborn[nobj] = ver[cell];
	ostate[nobj] = COMMITTED;
	i = nobj;
	nobj++
#ifdef WITNESS_REUSE
	; assert(!(reused && c == 2 && i > 0 && oclass[0] == 1 && hgen > 0))
#endif
}

/* The first chain of an operation is posted with the copy of the header that the
 * session has, if it has one. */
inline take_copy() {
	busy[w] = 1;
	have = cvalid[S]; lstate = cstate[S]; lclass = cclass[S]; lgen = cgen[S]
}

/* Values that are not used again are set to 0, so that the search merges equal states. */
inline drop_cache(s0) { cvalid[s0] = 0; cstate[s0] = 0; cclass[s0] = 0; cgen[s0] = 0 }
inline drop_copy() { have = 0; lstate = 0; lclass = 0; lgen = 0 }

#define OP_ALLOC	1
#define OP_BIRTH	2
#define OP_FREE		3

proctype Worker(byte w) {
	byte op, i, cell, c, g, lstate, lclass, lgen;
	bit have, won;

idle:
	atomic {
		RUNS && (w == 0 || started);
		started = 1;
		if
		:: mag[w] == 0 -> op = OP_ALLOC
		:: mag[w] != 0 && births < NOBJ -> op = OP_BIRTH; births++;
			cell = mag[w] - 1; c = magclass[w]; g = maggen[w]
		:: nobj > 0 && ostate[0] >= RETURNED -> op = OP_FREE; i = 0;
			cell = ocell[0]; c = oclass[0]; g = ogen[0]
#if NOBJ > 1
		:: nobj > 1 && ostate[1] >= RETURNED -> op = OP_FREE; i = 1;
			cell = ocell[1]; c = oclass[1]; g = ogen[1]
#endif
#if NOBJ > 2
		:: nobj > 2 && ostate[2] >= RETURNED -> op = OP_FREE; i = 2;
			cell = ocell[2]; c = oclass[2]; g = ogen[2]
#endif
		fi;
		take_copy()
	}
#ifdef HINTS
	if
	:: op == OP_ALLOC && hintclass[w] != 0 ->
		atomic { have = 1; lstate = H_ACTIVE; lclass = hintclass[w]; lgen = hintgen[w] }
	:: skip
	fi;
#endif
check:
	atomic {
		if
		:: !have -> skip
		:: have && op == OP_ALLOC && (lstate == H_ACTIVE || lstate == H_FREE) -> goto alloc
		:: have && op == OP_ALLOC && lstate != H_ACTIVE && lstate != H_FREE ->
			drop_cache(S); goto done	/* nothing to claim now */
#ifdef BUG_NO_HEADER_FIRST
		:: have && op != OP_ALLOC -> drop_copy(); goto slab
#else
		:: have && op != OP_ALLOC && lgen > g -> goto stale
		:: have && op != OP_ALLOC && (lgen < g || (lstate != H_ACTIVE && lstate != H_DRAINING)) ->
			drop_copy(); drop_cache(S)	/* the copy is old: READ again */
		:: have && op != OP_ALLOC && lgen == g && (lstate == H_ACTIVE || lstate == H_DRAINING) -> drop_copy(); goto slab
#endif
		fi
	}
	/* READ header. The copy goes to the cache if the operation is not an old one. */
	atomic { RUNS ->
		have = 1; lstate = hstate; lclass = hclass; lgen = hgen };
	atomic {
		if
#ifdef BUG_STALE_COPY_STORED
		:: true ->
#else
		:: !old[w] ->
#endif
			cvalid[S] = 1; cstate[S] = lstate; cclass[S] = lclass; cgen[S] = lgen
#ifndef BUG_STALE_COPY_STORED
		:: else
#endif
		fi;
		goto check
	}

stale:	/* ErrFreed without touching the slab; a claim of an older generation is dropped. */
	atomic {
		if
		:: op == OP_FREE -> assert(ostate[i] == FREED)
		:: op == OP_BIRTH -> births--; mag[w] = 0; magclass[w] = 0; maggen[w] = 0
		fi;
		goto done
	}

alloc:
	if
	:: lstate == H_FREE -> goto format
	:: lstate == H_ACTIVE
	fi;
	/* Refill, round 1: CAS one map bit 0 -> 1, then READ the header in the same chain. */
	atomic { RUNS ->
		c = lclass; g = lgen; drop_copy();
#ifdef HINTS
		hintclass[w] = c; hintgen[w] = g;
#endif
		if
		:: map[0] == 0 -> map[0] = 1; cell = 0
		:: map[1] == 0 && c == 1 -> map[1] = 1; cell = 1
		:: map[0] == 1 && (map[1] == 1 || c == 2) -> drop_cache(S); goto done
		fi
	}
#ifndef BUG_NO_CLAIM_CHECK
	atomic { RUNS ->
		if
		:: hstate == H_ACTIVE && hclass == c && hgen == g -> goto stamp
		:: else -> drop_cache(S)
		fi };
	atomic { RUNS -> map[cell] = 0; goto done };	/* give back */
#endif
	/* Refill, round 2: CAS R 0 -> me, READ V. Now the claim names its holder. */
stamp:
	atomic { RUNS ->
		LANDS(c, g);
		won = (R[cell] == 0);
		if
		:: won -> R[cell] = w + 1
		:: else
		fi };
	atomic { RUNS ->
		if
		:: won && !live[cell] ->
			mag[w] = cell + 1; magclass[w] = c; maggen[w] = g; goto done
		:: !won -> goto done			/* dropped, the map bit stays */
		:: won && live[cell]
		fi };
	atomic { RUNS -> LANDS(c, g); assert(R[cell] == w + 1); R[cell] = 0; goto done };

format:
	/* CAS header FREE -> FORMATTING, then ACTIVE. */
	atomic { RUNS ->
		if
		:: hstate == H_FREE && hgen == lgen ->
			hstate = H_FORMATTING; hsession = w + 1
		:: else -> drop_cache(S); goto done
		fi };
	atomic { RUNS ->
		assert(hstate == H_FORMATTING && hsession == w + 1);
		hstate = H_ACTIVE; hsession = 0;
		reused = (hgen > 0);
		if
		:: hclass = 1
		:: hclass = 2
		fi;
		drop_cache(S);
		goto done };

slab:
	if
	:: op == OP_BIRTH -> goto birth
	:: op == OP_FREE
	fi;

	/* Free: reserve and READ, tombstone, then keep the slab or give it back. */
	atomic { RUNS ->
		LANDS(c, g);
		won = (R[cell] == 0);
		if
		:: won -> R[cell] = w + 1
		:: else
		fi };
	atomic { RUNS ->
		if
		:: !live[cell] || ver[cell] != oborn[i] ->
			assert(ostate[i] == FREED);	/* ErrFreed only if it is */
			if
			:: won -> goto release
			:: else -> goto done
			fi
		:: else ->
			if
			:: won -> skip
			:: else -> goto done		/* held by another: back off */
			fi
		fi };
	atomic { RUNS ->
		LANDS(c, g);
		assert(live[cell] && ver[cell] == oborn[i]);
		live[cell] = 0; ver[cell] = ver[cell] + 1;	/* linearizes here */
		ostate[i] = FREED;
		if
		:: mag[w] == 0 ->			/* keep it: R stays */
			mag[w] = cell + 1; magclass[w] = c; maggen[w] = g; goto done
		:: skip
		fi };
	atomic { RUNS -> LANDS(c, g); assert(R[cell] == w + 1); R[cell] = 0 };
	atomic { RUNS -> LANDS(c, g); map[cell] = 0; goto done };

release:
	atomic { RUNS -> LANDS(c, g); assert(R[cell] == w + 1); R[cell] = 0; goto done };

birth:	/* WRITE image, CAS V, CAS R in one chain. */
	atomic { RUNS -> LANDS(c, g) };
	atomic { RUNS ->
		LANDS(c, g);
		assert(!live[cell]);
		live[cell] = 1; ver[cell] = ver[cell] + 1;	/* linearizes here */
		bear(cell, c, g) };
	atomic { RUNS ->
		LANDS(c, g);
		assert(R[cell] == w + 1);
		R[cell] = 0 };
	/* Return the Ref. */
	atomic {
		mag[w] = 0; magclass[w] = 0; maggen[w] = 0;
		assert(ostate[i] != FREED);
		ostate[i] = RETURNED
	}
done:
	atomic {
		busy[w] = 0; old[w] = 0;
		op = 0; i = 0; cell = 0; c = 0; g = 0; won = 0; drop_copy();
		goto idle
	}
}

/* A session's heartbeat: on learning an epoch it drops its header copies, waits for the
 * operations begun until then, and acknowledges. */
proctype Heartbeat(byte s) {
end_beat:
	do
	:: atomic { learned[s] != wanted && !fenced[s] ->
		learned[s] = wanted;
#if !defined(BUG_CACHE_SURVIVES) && !defined(BUG_DROP_AT_ACK)
		drop_cache(s);
#endif
#if SESSIONS == 1
		old[0] = busy[0]; old[1] = busy[1]
#else
		old[s] = busy[s]
#endif
	   };
	   atomic {
#if SESSIONS == 1
		!old[0] && !old[1] ->
#else
		!old[s] ->
#endif
#ifdef BUG_DROP_AT_ACK
		drop_cache(s);
#endif
		acked[s] = learned[s] }
	od
}

#define HEARD(s)	(acked[s] == wanted || fenced[s])
inline pass() {
	atomic { HEARD(0) && HEARD(SESSIONS - 1) }
}

/* Is slab k FREE and unreserved? R and V of one READ are two words: only a second look
 * at V proves that R was 0 while V was FREE. */
inline scan(k) {
#if defined(BUG_IGNORE_R)
	atomic { bare = bare && !live[k] };
#elif defined(BUG_SCAN_R_THEN_V)
	atomic { bare = bare && R[k] == 0 };
	atomic { bare = bare && !live[k] };
#elif defined(BUG_SCAN_V_THEN_R)
	atomic { bare = bare && !live[k] };
	atomic { bare = bare && R[k] == 0 };
#else
	atomic { bare = bare && !live[k]; seen = ver[k] };
	atomic { bare = bare && R[k] == 0 };
	atomic { bare = bare && !live[k] && ver[k] == seen };
#endif
	seen = 0
}

inline zero(k) {
	atomic {
		R[k] = 0; live[k] = 0; ver[k] = 0; map[k] = 0 }
}

inline not_lost() {
	/* What was born here and not freed would be gone. */
	assert(nobj < 1 || ostate[0] == FREED);
#if NOBJ > 1
	assert(nobj < 2 || ostate[1] == FREED);
#endif
#if NOBJ > 2
	assert(nobj < 3 || ostate[2] == FREED);
#endif
}

proctype Reclaimer() {
	byte tries, seen;
	bit bare;
end_next:
	do
	:: atomic { tries < NREC && hstate == H_ACTIVE -> hstate = H_DRAINING; tries++; bare = 1; wanted++ };
#ifndef BUG_NO_FIRST_PASS
		pass();
#endif
		scan(0);
		if
		:: hclass == 1 -> scan(1)
		:: else
		fi;
		if
		:: atomic { !bare -> hstate = H_ACTIVE }
		:: atomic { bare ->
			hstate = H_RECLAIM;
#ifndef BUG_SAME_GENERATION
			hgen++;
#endif
			wanted++ };
#ifndef BUG_ONE_PHASE
			pass();
#endif
			atomic { passed2 = 1; not_lost() };
			zero(0);
			zero(1);
			atomic { not_lost(); hclass = 0; passed2 = 0; hstate = H_FREE }
		fi
	od
}

#ifdef FENCE
proctype Fence() {
	if
	:: atomic { started -> fenced[0] = 1 }
	:: atomic { started -> fenced[1] = 1 }
	fi
}
#endif

init {
	atomic {
		run Worker(0); run Worker(1);
		run Heartbeat(0);
#if SESSIONS == 2
		run Heartbeat(1);
#endif
		run Reclaimer();
#ifdef FENCE
		run Fence()
#endif
	}
}
