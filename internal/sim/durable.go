package sim

// The promise of a durable read, in full (RATIONALE, "Why may a durable read be
// lost"): an answer to a writer is durable. What a reader saw at the primary is on
// every in-sync backup, durably, but may not be durable at the primary itself for
// as long as its writer has not come to the FLUSH behind its CAS. It is lost only
// if all nodes lose power then, and of the in-sync replicas the backups do not come
// back with their memory, or there was no backup.

// softAnswer says whether an operation that returns now may have seen what is not
// durable at the primary.
func (w *world) softAnswer(e *event) bool {
	switch {
	case !w.opt.Durable || e.reg < 0:
		return false
	case w.check.lost && w.check.lostAt >= e.call:
		return true // the power went between its READ and now
	}
	p := w.mem(w.ctl.table.node[0])
	s, _, ok := w.check.place(p, uint64(w.check.regs[e.reg].ref.Addr.Off()))
	return ok && p.Dirty(s.VOff(), 8)
}

// inSync is the set of nodes in sync in the present table.
func (k *control) inSync() (set [maxNodes]bool, n int) {
	for i := range k.table.n {
		if !k.table.rebuilding[i] {
			set[k.table.node[i]] = true
			n++
		}
	}
	return set, n
}

// powered notes a loss of power: which replicas have what readers have seen.
func (k *control) powered() {
	if k.dark {
		return // again, before anybody has opened
	}
	k.dark = true
	if k.had = k.served; k.table.open {
		k.had, _ = k.inSync()
	}
}

// lit is called when an epoch opens: did all those come back?
func (k *control) lit() {
	now, _ := k.inSync()
	if k.served = now; !k.dark {
		return
	}
	k.dark = false
	n, missing := 0, false
	for i, had := range k.had {
		if had {
			n++
			missing = missing || !now[i]
		}
	}
	if n > 1 && !missing {
		return
	}
	for i := range k.w.hist {
		e := &k.w.hist[i]
		e.gone = e.gone || e.soft || e.result == pendingResult && e.call <= k.w.check.lostAt
	}
}
