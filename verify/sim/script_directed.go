package sim

// ShutOut is the schedule in which client 0 loses its connection to the primary in the middle of
// an update and cannot open the region again before its deadline, because it cannot reach a
// backup, while the table says that the epoch goes on.
func ShutOut() *Script {
	s := CrashAt(whatUpdate, 0, Break, 0)
	s.Name = "shut-out"
	begin := s.Start
	s.Start = func(w *world) {
		s.At = 1 + w.ch.choose(8)
		w.d.patience = w.d.lease / 4
		begin(w)
	}
	s.also = func(w *world) {
		w.clients[0].reg = nil // as after a change of the reclaim epoch
		w.faults = append(w.faults, faultPlan{kind: CutClient, at: w.now, lasts: w.d.lease, who: 0, node: w.mirror.table.node[w.mirror.table.n-1]})
		w.at(w.now)
	}
	return s
}

// TakeoverBesideCopy is the schedule in which a client dies while a replica is being rebuilt.
// The others wait for its fence, so they take its slab over by a table in which the replica is
// rebuilding, though the copy may have ended meanwhile.
func TakeoverBesideCopy() *Script {
	s := &Script{Name: "takeover-beside-copy"}
	s.Start = func(w *world) {
		s.trap = trap{}
		w.d.patience = 20 * w.d.lease
		w.faults = append(w.faults,
			faultPlan{kind: NodeDown, at: int64(20+w.ch.choose(60)) * step, lasts: w.d.lease / 10 * int64(1+w.ch.choose(10)), node: w.mirror.table.node[w.mirror.table.n-1]},
			faultPlan{kind: Kill, on: onJoin, at: never, who: 0})
		w.at(w.now)
		for i := range w.d.clients {
			c := &w.clients[i]
			c.left = 60
			c.start(func() {
				for ; c.left > 0; c.left-- {
					if c.ended || c.session == 0 {
						c.openSession()
					}
					c.operateOn(whatUpdate, 0)
					c.sleep(int64(1+w.ch.choose(60)) * step)
				}
				if !c.ended && c.session != 0 {
					c.end("closed")
				}
			})
		}
	}
	return s
}

// TornCommit is the schedule in which a client dies at some verb of an update, and the primary
// loses its memory. What the backups have then is all that is left.
func TornCommit() *Script {
	s := CrashAt(whatUpdate, 0, Kill, 0)
	s.Name = "torn-commit"
	begin := s.Start
	s.Start = func(w *world) {
		s.At = 1 + w.ch.choose(12)
		begin(w)
	}
	s.also = func(w *world) {
		w.faults = append(w.faults, faultPlan{kind: NodeDown, at: w.now + int64(w.ch.choose(20))*step, lasts: w.d.lease, node: w.mirror.table.node[0]})
		w.at(w.now)
	}
	return s
}

// Unflushed is the schedule in which a client dies in a Free, perhaps between the CAS of V and
// its FLUSH, and a backup goes down. The next epoch has the same primary, and replicas that are
// alike. Other clients come back when it is open.
func Unflushed() *Script {
	s := CrashAt(whatFreeAndRelease, 0, Kill, 0)
	s.Name = "unflushed"
	begin := s.Start
	s.Start = func(w *world) {
		s.At = 1 + w.ch.choose(14)
		begin(w)
	}
	s.also = func(w *world) {
		w.faults = append(w.faults, faultPlan{kind: NodeDown, at: w.now, lasts: 2 * w.d.lease, node: w.mirror.table.node[w.mirror.table.n-1]})
		w.at(w.now)
		for i := 1; i < w.d.clients; i++ {
			w.clients[i].freeze(w.now + int64(2+w.ch.choose(3))*w.d.lease)
		}
	}
	return s
}
