package rdma

// Round is a set of chains on different connections: one network round trip.
// The zero Round is empty and ready; reuse one to keep its storage.
type Round struct {
	chains []Chain // storage; chains[:n] are in use, the others keep their verbs' storage
	n      int     // chains in use
	// Deadline bounds the wait, in nanoseconds of clock.Now; 0 is none. A chain
	// still unanswered then ends with ErrBroken.
	Deadline int64
}

// Reset empties the round, keeping its storage.
func (r *Round) Reset() { r.n = 0 }

// Chain appends an empty chain for a target. The pointer is valid until the next
// call of Chain or Reset: build one chain after the other, then use At.
func (r *Round) Chain(to *Target) *Chain {
	if r.n == len(r.chains) {
		r.chains = append(r.chains, Chain{})
	}
	c := &r.chains[r.n]
	r.n++
	c.Reset(to)
	return c
}

// Len is the number of chains.
func (r *Round) Len() int { return r.n }

// At is chain i.
func (r *Round) At(i int) *Chain { return &r.chains[i] }

// Err is the first error of any chain.
func (r *Round) Err() error {
	for i := range r.n {
		if err := r.chains[i].Err; err != nil {
			return err
		}
	}
	return nil
}

// Do posts every chain and waits for all of them. It never returns early: when it
// returns, each chain has its outcome in Err. Empty chains complete at once.
func Do(r *Round) {
	if r.n == 1 && len(r.chains[0].Verbs) > 0 {
		c := &r.chains[0]
		if conn, ok := c.To.Conn.(PostWaiter); ok {
			conn.PostAndWait(c, r.Deadline)
			return
		}
	}
	for i := range r.n {
		if c := &r.chains[i]; len(c.Verbs) > 0 {
			c.To.Conn.Post(c)
		}
	}
	for r.step() {
	}
	for i := range r.n {
		if c := &r.chains[i]; len(c.Verbs) > 0 {
			c.To.Conn.Wait(c, r.Deadline)
		}
	}
}

// Post posts every chain of a round and waits for none: Await does, or DoBehind.
// Preconditions: no verb of the round is a FLUSH.
func Post(r *Round) {
	for i := range r.n {
		if c := &r.chains[i]; len(c.Verbs) > 0 {
			c.To.Conn.Post(c)
		}
	}
}

// Await waits for a round that was posted.
func Await(r *Round) {
	for i := range r.n {
		if c := &r.chains[i]; len(c.Verbs) > 0 {
			c.To.Conn.Wait(c, r.Deadline)
		}
	}
}

// DoBehind is Do where a round was posted before and has not been awaited: it waits for both, one network
// round trip. Where chains are sent in parts it waits for the one before first.
func DoBehind(before, r *Round) {
	before.Deadline = r.Deadline
	for i := range r.n {
		if r.chains[i].To.Window.Flush == Message {
			Await(before)
			Do(r)
			return
		}
	}
	Post(r)
	Await(before)
	Await(r)
}

// step takes every chain that is sent in parts one part further, so that no chain waits for all parts of another.
// It reports whether there are parts behind those.
func (r *Round) step() (more bool) {
	for i := range r.n {
		c := &r.chains[i]
		if len(c.Verbs) == 0 || c.To.Window.Flush != Message && !c.verifies() {
			continue
		}
		if conn, ok := c.To.Conn.(Stepper); ok && conn.Step(c, r.Deadline) {
			more = true
		}
	}
	return more
}

// verifies says whether a verb of the chain is a VERIFY.
func (c *Chain) verifies() bool {
	for i := range c.Verbs {
		if c.Verbs[i].Op == Verify {
			return true
		}
	}
	return false
}

// Stepper is implemented by connections that send a chain in parts where the node is asked to flush or to hash: a verb that is ordered
// behind the FLUSH or the VERIFY is sent when the node has answered.
type Stepper interface {
	// Step waits for the part of a posted chain that is under way, unless it is the last, and sends the next. It reports
	// whether there is another part behind that. Wait tells the outcome.
	Step(c *Chain, deadline int64) (more bool)
}

// PostWaiter is implemented by connections that save something when a chain is alone in its
// round.
type PostWaiter interface {
	// PostAndWait is Post and Wait in one.
	// Preconditions: every chain posted before has been awaited.
	PostAndWait(c *Chain, deadline int64)
}

// Tally counts what went over the fabric. Plain words: a lane has one to itself.
type Tally struct {
	Rounds uint64      // awaited, one network round trip each
	Verbs  [Ops]uint64 // by Op
	Fences uint64      // verbs with a fence: each waits a round trip longer on a queue pair
	Bytes  uint64      // of READs and WRITEs
	// Verified counts the bytes of VERIFYs, which are not moved.
	Verified uint64
}

// Count adds a round that has been awaited.
func (t *Tally) Count(r *Round) {
	t.Rounds++
	t.CountPosted(r)
}

// CountPosted adds a round that nothing waits for.
func (t *Tally) CountPosted(r *Round) {
	for i := range r.n {
		for j := range r.chains[i].Verbs {
			v := &r.chains[i].Verbs[j]
			t.Verbs[v.Op]++
			if v.Fence {
				t.Fences++
			}
			switch v.Op {
			case Read, Write:
				t.Bytes += uint64(len(v.Buf))
			case Verify:
				t.Verified += v.Bytes
			}
		}
	}
}

// Add adds what a tally has gained from one time to a later one.
func (t *Tally) Add(now, since *Tally) {
	t.Rounds += now.Rounds - since.Rounds
	t.Bytes += now.Bytes - since.Bytes
	t.Verified += now.Verified - since.Verified
	t.Fences += now.Fences - since.Fences
	for op := range t.Verbs {
		t.Verbs[op] += now.Verbs[op] - since.Verbs[op]
	}
}

// AllVerbs is the sum over all kinds of verbs.
func (t *Tally) AllVerbs() uint64 {
	var n uint64
	for _, v := range t.Verbs {
		n += v
	}
	return n
}
