package models

// A search is one exhaustive run of one model.
type search struct {
	model string
	name  string
	defs  string // spin's -D flags: bounds and bugs
	pan   string // flags of the compiled search
	size  size

	// finds is a part of the assertion that the search must see violated; empty if the search
	// must end without an error.
	finds string
}

// size says which test runs include a search.
type size uint8

const (
	usual size = iota // every run without -short
	quick             // with -short too
	large             // with MODELS=all, some ten minutes in all
)

// Parts of the assertions that a bug violates, as Spin prints them.
const (
	oneHolder    = "holds["       // two sessions hold the slab and both can still change it
	inSync       = "(V[1]==V[0])" // replicas agree with P where no operation is in progress
	backupWhole  = "V[1]>=V[0]"   // the primary can be lost at any moment
	readersImage = "V[0]!=ver"    // what a reader accepts is what was committed
	ownRelease   = "R[p]==(w+1)"  // nobody else changed my reservation
	landsHere    = "hclass==c"    // a verb lands in a slab of its class
	notLost      = "==3)"         // what was born is there until it is freed
	monotone     = "ver>=low"     // a read is no older than what was known when it began
	freshForF    = "v>=low"       // the same for what an Update reads
	ackKept      = "best>=floor"  // acknowledged is never lost
	flipFinds    = "(V[0]==v)"    // a flip finds the old or its own value
	stuck        = "invalid end state"
	reached      = "assertion violated"
)

// The designs. Bounds are those of docs/models/README.md.
var designs = []search{
	{model: "takeover", name: "P+1 backup", defs: "-DNB=1", size: quick},
	{model: "takeover", name: "P+2 backups", defs: "-DNB=2", size: large},
	{model: "reclaim", name: "two clients, one reclaim", defs: "-DNREC=1"},
	{model: "reclaim", name: "two clients, two reclaims", defs: "-DNREC=2", size: large},
	{model: "reclaim", name: "one client, two workers", defs: "-DSESSIONS=1 -DNREC=1", size: large},
	{model: "reclaim", name: "a client is fenced", defs: "-DFENCE -DNREC=1 -DNOBJ=1", pan: "-E"},
	{model: "reclaim", name: "claims from old headers", defs: "-DHINTS -DSESSIONS=1 -DNREC=1 -DNOBJ=1", size: quick},
	// If sessions drop their caches at every acknowledgement, the header check after a claim
	// is a second line of defence. With HINTS it is the only one; see bugs.
	{model: "reclaim", name: "claim check is a second line", defs: "-DBUG_NO_CLAIM_CHECK -DSESSIONS=1 -DNREC=1", size: large},
	{model: "failover", name: "one removal, two writers", defs: "-DFAILS=1"},
	{model: "failover", name: "two removals, one writer", defs: "-DWRITERS=1", size: quick},
	{model: "failover", name: "two removals, two writers", defs: "-DONE_CLIENT", size: large},
	{model: "failover", name: "no writer waits for ever", defs: "-DNO_READER", size: large},
	{model: "failover", name: "lease looked at first", defs: "-DCHECK_BEFORE -DWRITERS=1"},
}

// The deliberate mistakes, searched breadth first: the counterexample is a shortest one.
var bugs = []search{
	{model: "takeover", name: "takeover before the fence", defs: "-DNB=1 -DBUG_TAKEOVER_BEFORE_FENCE", finds: oneHolder, size: quick},
	{model: "takeover", name: "takeover before the fence, damage", defs: "-DNB=1 -DONLY_DAMAGE -DBUG_TAKEOVER_BEFORE_FENCE", finds: inSync, size: large},
	{model: "takeover", name: "certificate before all acknowledgements", defs: "-DNB=1 -DBUG_EARLY_CERTIFICATE", finds: oneHolder, size: quick},
	{model: "takeover", name: "certificate before all acknowledgements, damage", defs: "-DNB=1 -DONLY_DAMAGE -DBUG_EARLY_CERTIFICATE", finds: inSync, size: large},
	{model: "takeover", name: "fence at the primary only", defs: "-DNB=1 -DBUG_FENCE_PRIMARY_ONLY", finds: oneHolder, size: quick},
	{model: "takeover", name: "fence at the primary only, damage", defs: "-DNB=1 -DONLY_DAMAGE -DBUG_FENCE_PRIMARY_ONLY", finds: inSync, size: large},
	{model: "takeover", name: "fencing after the takeover", defs: "-DNB=1 -DBUG_REFENCE", finds: oneHolder},
	{model: "takeover", name: "fencing after the takeover, damage", defs: "-DNB=1 -DONLY_DAMAGE -DBUG_REFENCE", finds: "R==s"},
	{model: "takeover", name: "no roll-back at takeover", defs: "-DNB=1 -DBUG_NO_ROLLBACK", finds: backupWhole, size: quick},
	{model: "takeover", name: "primary first", defs: "-DNB=1 -DBUG_PRIMARY_FIRST", finds: backupWhole, size: quick},
	{model: "takeover", name: "R released before V", defs: "-DNB=1 -DBUG_RELEASE_FIRST", finds: inSync, size: quick},
	{model: "takeover", name: "no version skip", defs: "-DNB=1 -DBUG_NO_VERSION_SKIP", finds: readersImage},

	{model: "reclaim", name: "no first pass", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_NO_FIRST_PASS", finds: notLost, size: quick},
	{model: "reclaim", name: "one phase", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_ONE_PHASE", finds: landsHere},
	{model: "reclaim", name: "generation not bumped", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_SAME_GENERATION", finds: landsHere},
	{model: "reclaim", name: "generation not bumped, damage", defs: "-DSESSIONS=1 -DNREC=1 -DONLY_DAMAGE -DBUG_SAME_GENERATION", finds: "ogen[i]!=g", size: large},
	{model: "reclaim", name: "no header check after the claim", defs: "-DSESSIONS=1 -DNREC=1 -DHINTS -DBUG_NO_CLAIM_CHECK", finds: landsHere},
	{model: "reclaim", name: "reclaim ignores R", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_IGNORE_R", finds: notLost, size: quick},
	{model: "reclaim", name: "no header first", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_NO_HEADER_FIRST", finds: landsHere},
	{model: "reclaim", name: "scan looks at R, then at V", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_SCAN_R_THEN_V", finds: notLost},
	{model: "reclaim", name: "scan looks at V, then at R", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_SCAN_V_THEN_R", finds: notLost, size: quick},
	{model: "reclaim", name: "cached headers survive the pass", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_CACHE_SURVIVES", finds: landsHere},
	{model: "reclaim", name: "cached headers dropped only with the acknowledgement", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_DROP_AT_ACK", finds: landsHere},
	{model: "reclaim", name: "an old operation fills the cache", defs: "-DSESSIONS=1 -DNREC=1 -DBUG_STALE_COPY_STORED", finds: landsHere},

	{model: "failover", name: "no key rotation", defs: "-DFAILS=1 -DWRITERS=1 -DBUG_NO_KEY_ROTATION", finds: ownRelease, size: quick},
	{model: "failover", name: "no wait for leases", defs: "-DFAILS=1 -DWRITERS=1 -DBUG_NO_LEASE_WAIT", finds: monotone},
	{model: "failover", name: "no reconcile", defs: "-DFAILS=1 -DNO_READER -DBUG_NO_RECONCILE", finds: flipFinds},
	{model: "failover", name: "no reconcile, two removals", defs: "-DWRITERS=1 -DBUG_NO_RECONCILE", finds: monotone, size: large},
	{model: "failover", name: "reservations kept", defs: "-DFAILS=1 -DNO_READER -DBUG_RESERVATIONS_KEPT", finds: stuck, size: quick},
	{model: "failover", name: "a refusal counts as done", defs: "-DFAILS=1 -DWRITERS=1 -DBUG_REFUSED_COUNTS", finds: ackKept, size: quick},
	{model: "failover", name: "lease not checked, Read", defs: "-DFAILS=1 -DWRITERS=1 -DBUG_NO_LEASE_CHECK", finds: monotone, size: quick},
	{model: "failover", name: "lease not checked, Update", defs: "-DFAILS=1 -DNO_READER -DBUG_UPDATE_UNCHECKED", finds: freshForF},
	{model: "failover", name: "lease checked, epoch not", defs: "-DFAILS=1 -DWRITERS=1 -DBUG_NO_EPOCH_CHECK", finds: monotone},
}

// States that must be reachable.
var witnesses = []search{
	{model: "takeover", name: "C from B from A commits", defs: "-DNB=1 -DWITNESS_CHAIN", finds: reached, size: quick},
	{model: "reclaim", name: "block reused in the other class", defs: "-DSESSIONS=1 -DNREC=1 -DWITNESS_REUSE", finds: reached, size: quick},
	{model: "failover", name: "acknowledged after a removal", defs: "-DWRITERS=1 -DWITNESS_ACK_AFTER_REMOVAL", finds: reached, size: quick},
	{model: "failover", name: "newer value read in the last epoch", defs: "-DONE_CLIENT -DWITNESS_READ_LAST", finds: reached},
}
