/*
 * takeover.pml: one slab, its reservation word R, three sessions, the fence.
 *
 * What is proved: docs/DESIGN.md#operations (Update) and #sessions-and-fences (fence first, take over second,
 * roll back before anything else). See README.md for bounds and results.
 *
 * A session process is also its connections: between any two of its steps any time
 * may pass, so a verb posted before a pause may land after it. Nothing but
 * fenced[replica, session] stops a verb, and it stops it at that replica only.
 * A dead session is one that is never scheduled again.
 *
 *   -DNB=n     backups (default 2; replica 0 is the primary)
 *   -DNS=n     sessions (default 3: A, then B from A, then C from B)
 *   -DOPS=n    Updates each session attempts (default 1)
 *   -DONLY_DAMAGE  leave out the two rules about sessions, so that Spin finds a bug only
 *              when words or images are wrong
 *   -DBUG_...  a deliberate mistake that the search must find
 *   -DWITNESS_...  a state that must be reachable, or the proof is empty
 */
#ifndef NB
#define NB 2
#endif
#ifndef NS
#define NS 3
#endif
#ifndef OPS
#define OPS 1
#endif
#define NR (NB + 1)
#define MIX 7			/* writer of an image that is half written */

byte V[NR] = 2;			/* version word of the slab at each replica */
byte iv[2 * NR];		/* image: version word; place 2r is even, 2r+1 odd */
byte iw[2 * NR];		/* image: its writer, MIX if the checksum is wrong */
byte R = 0;			/* reservation word, at the primary only */

bit fenced[NR * (NS + 1)];	/* [replica, session] no verb passes any more */
bit asked[NS + 1];		/* the fence of this session was requested */
bit cert[NS + 1];		/* the controller issued the certificate */

/* Ghosts: not in the protocol, only for the assertions. */
bit holds[NS + 1];		/* the session believes that it holds the slab */
bit begun[NS + 1];		/* sessions are alike: they start in order */
byte taken_over;		/* takeovers so far */

#define PLACE(r, ver)	(2 * (r) + ((ver) & 1))
#define FREE_TO_RUN(r)	(!fenced[(r) * (NS + 1) + s])

/* Invariant after every verb: P can be lost now, whichever one backup survives. V of that
 * backup names a whole image that is at least as new as any that a reader may have seen at
 * P, and the same image if it has the same version. */
#define NAMES_WHOLE(r)	(iv[PLACE(r, V[r])] == V[r] && iw[PLACE(r, V[r])] != MIX)
#define SAME_IMAGE(r)	(iw[PLACE(r, V[r])] == iw[PLACE(0, V[0])])
inline check() {
	assert(NAMES_WHOLE(0));
	assert(V[1] >= V[0] && NAMES_WHOLE(1));
	assert(V[1] != V[0] || SAME_IMAGE(1));
#if NB > 1
	assert(V[2] >= V[0] && NAMES_WHOLE(2));
	assert(V[2] != V[0] || SAME_IMAGE(2))
#endif
}

#ifdef ONLY_DAMAGE
#define RULE(x)	true
#else
#define RULE(x)	(x)
#endif

/* No verb that changes a byte runs after the certificate. */
inline changes() { assert(RULE(!cert[s])) }

inline in_sync() {
	assert(V[1] == V[0] && SAME_IMAGE(1));
#if NB > 1
	assert(V[2] == V[0] && SAME_IMAGE(2))
#endif
}

#define RUNS(t)	(!fenced[t] || !fenced[(NS + 1) + t] || (NB > 1 && !fenced[NB * (NS + 1) + t]))

inline becomes_holder() {
	holds[s] = 1;
	/* At most one holder can still change a byte anywhere. */
	assert(RULE(s == 1 || !holds[1] || !RUNS(1)));
	assert(RULE(s == 2 || !holds[2] || !RUNS(2)));
#if NS > 2
	assert(RULE(s == 3 || !holds[3] || !RUNS(3)))
#endif
}

/* WRITE of an image is two steps: a READ, a fence or a death may fall between. The
 * version word is 8 bytes: in a torn image it is the old one or the new one. */
inline write_first(r) {
	changes();
	iw[PLACE(r, n)] = MIX;
	if
	:: iv[PLACE(r, n)] = n
	:: skip
	fi;
	check()
}

inline write_second(r) {
	changes();
	iv[PLACE(r, n)] = n; iw[PLACE(r, n)] = s;
	check()
}

/* CAS V on an in-sync backup: it finds the old or its own value, nothing else. */
inline flip(r) {
	changes();
	assert(V[r] == v || V[r] == n);
	V[r] = n;
	check()
}

/* The chain that step 2 posted to replica r, verb by verb. */
#define CHAIN(r) \
	:: atomic { pos[r] == 0 && FREE_TO_RUN(r) -> write_first(r); pos[r] = 1 } \
	:: atomic { pos[r] == 1 && FREE_TO_RUN(r) -> write_second(r); pos[r] = 2 }
#define CHAIN_B(r) CHAIN(r) \
	:: atomic { pos[r] == 2 && FREE_TO_RUN(r) -> flip(r); pos[r] = 3 }
#define ROLL(r) \
	:: atomic { bv[r] != v && FREE_TO_RUN(r) -> \
		changes(); assert(V[r] == bv[r]); V[r] = v; bv[r] = v; check() }

proctype Session(byte s) {
	byte v, n, h, ops;
	byte pos[NR];
	byte bv[NR];
	bit took;

	begun[s - 1];
start:
	atomic { v = 0; n = 0; h = 0; took = 0; pos[0] = 0; pos[1] = 0; bv[1] = 0;
#if NB > 1
		pos[2] = 0; bv[2] = 0;
#endif
		if
		:: ops == OPS -> goto finish
		:: else
		fi }

	/* Step 1, first verb: CAS R 0 -> s. */
end_reserve:
	atomic { FREE_TO_RUN(0);
		begun[s] = 1;
		if
		:: R == 0 -> changes(); R = s; becomes_holder(); goto reserved
		:: else -> h = R
		fi }

	/* Held by h. Request its fence, and wait for the certificate or for h to release R. */
#ifndef BUG_REFENCE
	asked[h] = 1;
#endif
end_wait:
	atomic {
#if defined(BUG_TAKEOVER_BEFORE_FENCE) || defined(BUG_REFENCE)
		skip;
#else
		(cert[h] || R != h) ->
#endif
		if
		:: R != h -> goto start
		:: else
		fi }

	/* Takeover round: CAS R h -> s and READ at P, READ V at every backup. The
	 * backups may answer before or after P. */
	if
	:: atomic { FREE_TO_RUN(1) -> bv[1] = V[1] };
#if NB > 1
	   atomic { FREE_TO_RUN(2) -> bv[2] = V[2] };
#endif
	:: skip
	fi;
end_take:
	atomic { FREE_TO_RUN(0);
		if
		:: R == h -> changes(); R = s; took = 1; taken_over++;
#ifndef BUG_REFENCE
			becomes_holder()
#endif
		:: else -> goto start
		fi }
#ifdef BUG_REFENCE
	/* The former holder is fenced only now: safe for one takeover, not for two. */
	asked[h] = 1;
end_refence:
	atomic { cert[h] -> becomes_holder() }
#endif
end_read_backups:
	if
	:: bv[1] != 0 -> skip
	:: atomic { bv[1] == 0 && FREE_TO_RUN(1) -> bv[1] = V[1] };
#if NB > 1
end_read_backup2:
	   atomic { FREE_TO_RUN(2) -> bv[2] = V[2] };
#endif
	fi;

reserved:
	/* Step 1, second verb: READ. The version skips a dead writer's leftover. */
end_read:
	atomic { FREE_TO_RUN(0);
		v = V[0];
		if
		:: took ->
			h = 0
		:: else ->
			h = 0;
			in_sync();	/* R was 0: there is no unfinished commit */
			bv[1] = v;
#if NB > 1
			bv[2] = v
#endif
		fi;
		n = v + 1;
#ifndef BUG_NO_VERSION_SKIP
		if
		:: iv[PLACE(0, n)] >= n -> n = iv[PLACE(0, n)] + 2
		:: else
		fi
#endif
	}
#ifdef BUG_NO_ROLLBACK
	atomic { bv[1] = v;
#if NB > 1
		bv[2] = v;
#endif
	}
#endif

rollback:
	do
	ROLL(1)
#if NB > 1
	ROLL(2)
	:: atomic { bv[1] == v && bv[2] == v -> break }
#else
	:: atomic { bv[1] == v -> break }
#endif
	:: atomic { !FREE_TO_RUN(1) || !FREE_TO_RUN(NB) -> goto end_dead }
	od;
#ifndef BUG_NO_ROLLBACK
	atomic { if
		:: took && RUNS(s) -> in_sync()	/* after a takeover all replicas agree with P */
		:: else
		fi }
#endif
	if
	:: took -> goto release		/* a taker may give it back at once */
	:: n != 0 -> skip
	:: n == 0 -> goto release	/* gave up: rolled back, now release */
	fi;

	/* Step 2: one round, every chain at its own pace. */
#ifdef BUG_PRIMARY_FIRST
	atomic { FREE_TO_RUN(0) -> write_first(0) };
	atomic { FREE_TO_RUN(0) -> write_second(0); pos[0] = 2 };
	atomic { FREE_TO_RUN(0) -> changes(); V[0] = n; check() };
#endif
end_step2:
	do
	CHAIN(0)
	CHAIN_B(1)
#if NB > 1
	CHAIN_B(2)
#endif
#if NB > 1
	:: atomic { pos[0] == 2 && pos[1] == 3 && pos[2] == 3 -> break }
#else
	:: atomic { pos[0] == 2 && pos[1] == 3 -> break }
#endif
	od;

	/* Step 3, or give up a commit in the way of a takeover. */
	if
	:: skip
	:: atomic { bv[1] = n;
#if NB > 1
		bv[2] = n;
#endif
		n = 0; took = 0; goto rollback }
	fi;
#ifdef BUG_RELEASE_FIRST
end_release_first:
	atomic { FREE_TO_RUN(0) ->
		changes(); assert(R == s); R = 0; holds[s] = 0 };
#endif
end_commit:
	atomic { FREE_TO_RUN(0) ->
		changes();
		assert(V[0] == v || V[0] == n);
		V[0] = n;			/* linearizes here */
		check();
#if defined(WITNESS_CHAIN)
		assert(taken_over < 2)
#endif
	}
release:
#ifndef BUG_RELEASE_FIRST
end_release:
	atomic { FREE_TO_RUN(0) ->
		changes(); assert(R == s); R = 0; holds[s] = 0 };
#endif
	ops++;
	goto start;
end_dead:
	false;
finish:
	skip
}

#if defined(BUG_EARLY_CERTIFICATE)
#define ACKNOWLEDGED	(fenced[s] || fenced[(NS + 1) + s])
#elif defined(BUG_FENCE_PRIMARY_ONLY)
#define ACKNOWLEDGED	(fenced[s])
#else
#define ACKNOWLEDGED	(!RUNS(s))
#endif

/* The controller and the agents, for one session. It begins when the lease has run out at
 * the granter, which is any time after the request. */
proctype Fencer(byte s) {
end_ask:
	asked[s];
end_fence:
	do
	:: atomic { !fenced[s] -> fenced[s] = 1 }
#ifndef BUG_FENCE_PRIMARY_ONLY
	:: atomic { !fenced[(NS + 1) + s] -> fenced[(NS + 1) + s] = 1 }
#if NB > 1
	:: atomic { !fenced[2 * (NS + 1) + s] -> fenced[2 * (NS + 1) + s] = 1 }
#endif
#endif
	:: atomic { !cert[s] && ACKNOWLEDGED -> cert[s] = 1 }
	od
}

/* Readers do not read R. One READ may see the image early and V late. An image that is
 * accepted must be the one that is committed under that version. */
#define READ(place) \
	:: atomic { iw[place] != MIX -> ver = iv[place]; who = iw[place] }; \
	   atomic { assert(V[0] != ver || (iv[place] == ver && iw[place] == who)); \
		ver = 0; who = 0 }

proctype Reader() {
	byte ver, who;
end_again:
	do
	READ(0)
	READ(1)
	od
}

init {
	byte r;
	atomic {
		r = 0;
		do
		:: r < NR -> iv[2 * r] = 2; iv[2 * r + 1] = 1; r++
		:: else -> break
		od;
		begun[0] = 1;
		r = 1;
		do
		:: r <= NS -> run Session(r); run Fencer(r); r++
		:: else -> break
		od;
		run Reader();
		r = 0
	}
}
