package sim

// The guarantee of a durable read (RATIONALE, "Why may a durable read be lost"): an answer to
// a writer is durable. An image that a reader has seen at the primary is durable on every
// in-sync backup. At the primary itself it may not be durable until its writer's FLUSH behind
// the CAS. It is lost only if all nodes lose power in that time and no in-sync backup comes
// back with its memory, or if there was no backup.

// softAnswer reports whether an operation that returns now may have seen an image that is not
// durable at the primary.
func (w *world) softAnswer(e *event) bool {
	switch {
	case !w.opt.Durable || e.reg < 0:
		return false
	case w.opt.Open && w.mirror.replicated():
		return false // what is settled is durable everywhere, and an open V is flushed before it is gone by
	case w.check.lost && w.check.lostAt >= e.call:
		return true // the power was lost between its READ and now
	}
	p := w.mem(w.mirror.table.node[0])
	s, _, ok := w.check.place(p, uint64(w.check.regs[e.reg].ref.Addr.Off()))
	return ok && p.Dirty(s.VOff(), 8)
}

// inSync is the set of nodes in sync in the present table.
func (k *mirror) inSync() (set [maxNodes]bool, n int) {
	for i := range k.table.n {
		if !k.table.rebuilding[i] {
			set[k.table.node[i]] = true
			n++
		}
	}
	return set, n
}

// replicated reports whether several replicas are in sync, or were at the loss of power.
func (k *mirror) replicated() bool {
	_, n := k.inSync()
	if k.dark {
		n = 0
		for _, had := range k.had {
			if had {
				n++
			}
		}
	}
	return n > 1
}

// powered notes, at a loss of power, which replicas have the images that readers have seen.
func (k *mirror) powered() {
	if k.dark {
		return // a second loss before an epoch has opened
	}
	k.dark = true
	if k.had = k.served; k.table.open {
		k.had, _ = k.inSync()
	}
}

// lit is called when an epoch opens. It checks whether all those replicas have come back.
func (k *mirror) lit() {
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
