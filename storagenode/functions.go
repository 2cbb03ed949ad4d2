package storagenode

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// This file passes calls of functions on to workers beside this node. No user code runs in the node's process: a worker is a process of its own,
// whose end costs no memory. It takes a call, reads the object, runs the function, writes the object if it is still the one that was read,
// under a session of its own in the caller's tenant, and gives the answer. The node checks that the caller may change the object, and has
// the calls for one object made one after the other.
//
// Invariant: a call is in the queue, or with one worker, or over. A worker gets it once, so it is made at most once. When its time is up
// a call that is in the queue is not done; one that a worker has is unknown.

const (
	// maxCall bounds the time of a call: a fence of its caller waits as long.
	maxCall = time.Second
	// maxCalls bounds the calls in the queue, and maxPlaces the places of workers.
	maxCalls  = 256
	maxPlaces = 256
	// tenantShare is what part of the queue and of the places one tenant may have.
	tenantShare = 4
	// maxTake bounds how long a take is held. A place that has not been heard of for placeGone longer is forgotten.
	maxTake   = 30 * time.Second
	placeGone = 5 * time.Second
)

// functions are the places of workers, and the calls for them.
type functions struct {
	mu     sync.Mutex // guards all fields
	turns  map[uint32]*tenantTurns
	places map[placeID]*place // changed by set alone
	listed map[offered]int    // how many places list a function
	queue  []*call            // not taken, in the order in which they came
	taken  map[uint64]*call   // by number
	last   uint64             // number of a call
}

// tenantTurns are the turns at the objects of one tenant, while it has calls: those of one tenant do not fill the queues of others.
type tenantTurns struct {
	turns
	calls int // that use them; guarded by functions.mu
}

// enter returns the turns for a call of a tenant, which ends their use with leave.
func (f *functions) enter(tenant uint32) *tenantTurns {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.turns == nil {
		f.turns = map[uint32]*tenantTurns{}
	}
	q := f.turns[tenant]
	if q == nil {
		q = &tenantTurns{}
		f.turns[tenant] = q
	}
	q.calls++
	return q
}

func (f *functions) leave(tenant uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if q := f.turns[tenant]; q.calls > 1 {
		q.calls--
	} else {
		delete(f.turns, tenant)
	}
}

// placeID names a place: number is its worker's choice.
type placeID struct{ serial, number uint64 }

// place is where a worker makes one call at a time.
type place struct {
	tenant uint32 // of its session
	any    bool   // it makes calls of uploaded modules
	names  []string
	ready  chan struct{} // of capacity 1: there may be a call for it
	until  int64         // of the take that is held, clock.Now time; 0: none is
	gone   int64         // when it counts as gone, unless it is heard of
}

// call is one call of a function.
type call struct {
	msg.Taken
	tenant uint32
	until  int64                 // clock.Now time
	worker uint64                // serial of the session that has taken it
	answer chan msg.ObjectAnswer // of capacity 1
}

// offered names a function that a place lists.
type offered struct {
	tenant   uint32
	function string
}

// makes says whether calls of a function in a tenant are for a place: it lists the function, or makes calls of uploaded modules and no place
// lists the function. A module has no calls while a function compiled into a worker has its name.
// Preconditions: f.mu is held.
func (f *functions) makes(p *place, tenant uint32, function string) bool {
	return p.tenant == tenant && (p.any && f.listed[offered{tenant, function}] == 0 || slices.Contains(p.names, function))
}

// set puts a place at id, in the stead of the one that is there; nil removes it.
// Preconditions: f.mu is held.
func (f *functions) set(id placeID, p *place) {
	if was := f.places[id]; was != nil {
		for _, name := range was.names {
			if o := (offered{was.tenant, name}); f.listed[o] > 1 {
				f.listed[o]--
			} else {
				delete(f.listed, o)
			}
		}
		delete(f.places, id)
	}
	if p == nil {
		return
	}
	if f.places == nil {
		f.places, f.listed = map[placeID]*place{}, map[offered]int{}
	}
	for _, name := range p.names {
		f.listed[offered{p.tenant, name}]++
	}
	f.places[id] = p
}

// forget removes the places that count as gone, and wakes the others: calls that were for those alone may be for them now.
// Preconditions: f.mu is held.
func (f *functions) forget(gone func(placeID, *place) bool) {
	n := len(f.places)
	for id, p := range f.places {
		if gone(id, p) {
			f.set(id, nil)
		}
	}
	if len(f.places) < n {
		for _, p := range f.places {
			ring(p.ready)
		}
	}
}

// notDone is an answer that says why.
func notDone(r msg.Reason, text string) msg.ObjectAnswer {
	return msg.ObjectAnswer{Outcome: msg.NotDone, Reason: r, Payload: []byte(text)}
}

// call has a worker call a function on an object.
//
// Linearizes at: the worker's CAS of V; of a function that leaves the object as it is, at its READ.
func (n *Node) call(from *rdma.Ticket, r *msg.ObjectRequest) msg.ObjectAnswer {
	name, args, err := msg.ParseFunction(r.Payload)
	if err == nil {
		_, err = n.serves(from, r.Ref.Addr.Region(), r.Epoch)
	}
	if err != nil {
		return notDone(msg.Elsewhere, err.Error())
	}
	f, until := &n.functions, clock.In(min(r.Wait, maxCall))
	turns := f.enter(from.Tenant)
	defer f.leave(from.Tenant)
	if !turns.enter(r.Ref.Addr, 0, until) {
		return notDone(msg.Busy, "other calls for the object come first")
	}
	defer turns.leave(r.Ref.Addr)
	c := &call{Taken: msg.Taken{Ref: r.Ref, Function: name, Args: args}, tenant: from.Tenant, until: until, answer: make(chan msg.ObjectAnswer, 1)}
	if refused := f.put(c); refused != nil {
		return *refused
	}
	t := time.NewTimer(time.Duration(until - clock.Now()))
	defer t.Stop()
	select {
	case a := <-c.answer:
		return a
	case <-t.C:
	case <-n.ctx.Done():
	}
	return f.giveUp(c)
}

// put puts a call into the queue, and wakes the places that make such calls; an answer: there is none, or the queue has no room for the tenant.
func (f *functions) put(c *call) *msg.ObjectAnswer {
	f.mu.Lock()
	defer f.mu.Unlock()
	own := 0
	for _, o := range f.queue {
		if o.tenant == c.tenant {
			own++
		}
	}
	if len(f.queue) >= maxCalls || own >= maxCalls/tenantShare {
		a := notDone(msg.Busy, "too many calls wait for workers, of all tenants or of this one")
		return &a
	}
	now, some := clock.Now(), false
	f.forget(func(_ placeID, p *place) bool { return now > p.gone })
	for _, p := range f.places {
		if f.makes(p, c.tenant, c.Function) {
			some = true
			ring(p.ready)
		}
	}
	if !some {
		a := notDone(msg.NoFunction, "no worker beside the node, in the tenant, has this function")
		return &a
	}
	f.last++
	c.Call = f.last
	f.queue = append(f.queue, c)
	return nil
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// giveUp ends a call whose time is up.
func (f *functions) giveUp(c *call) msg.ObjectAnswer {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case a := <-c.answer:
		return a
	default:
	}
	if i := slices.Index(f.queue, c); i >= 0 {
		f.queue = slices.Delete(f.queue, i, i+1)
		return notDone(msg.Busy, "no worker has been free in time")
	}
	delete(f.taken, c.Call)
	return msg.ObjectAnswer{Outcome: msg.Unknown, Payload: []byte("a worker has taken the call, and has not answered in time")}
}

var (
	errNoPlace  = errors.New("no such place of a worker: offer functions first")
	errPlaces   = errors.New("the node has as many places of workers as it may, or this tenant has its quarter of them")
	errReadOnly = errors.New("a worker needs a session that may write")
)

// worker is the procedure msg.Worker.
func (n *Node) worker(from *rdma.Ticket, request, answer []byte) (int, error) {
	r, err := msg.ParseWorker(request)
	switch {
	case err != nil:
		return 0, err
	case from.Rights != rdma.ReadWrite || from.Region != 0:
		return 0, errReadOnly
	}
	f, id := &n.functions, placeID{from.Serial, r.Place}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch r.Op {
	case msg.WorkerOffer:
		return 0, f.offer(from, id, &r)
	case msg.WorkerTake:
		return f.take(id, min(r.Wait, maxTake), answer)
	}
	f.give(from.Serial, &r)
	return 0, nil
}

// offer makes a place, or changes what it makes.
// Preconditions: f.mu is held.
func (f *functions) offer(from *rdma.Ticket, id placeID, r *msg.WorkerRequest) error {
	now, own, tenants := clock.Now(), 0, 0
	f.forget(func(_ placeID, p *place) bool { return now > p.gone })
	for o, p := range f.places {
		if o.serial == id.serial && o != id {
			own++
		}
		if p.tenant == from.Tenant {
			tenants++
		}
	}
	switch {
	case len(r.Names) > msg.MaxFunctionNames:
		return errors.New("more names than a place may offer")
	case own >= host.CallLanes || f.places[id] == nil && (len(f.places) >= maxPlaces || tenants >= maxPlaces/tenantShare):
		return errPlaces
	}
	f.set(id, &place{tenant: from.Tenant, any: r.Any, names: r.Names, ready: make(chan struct{}, 1), gone: clock.In(placeGone)})
	return nil
}

// left forgets the places of a session whose last connection to this node has ended.
func (f *functions) left(serial uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forget(func(id placeID, _ *place) bool { return id.serial == serial })
}

// take answers with a call, or is held until there is one.
// Preconditions: f.mu is held.
func (f *functions) take(id placeID, wait time.Duration, answer []byte) (int, error) {
	p := f.places[id]
	if p == nil {
		return 0, errNoPlace
	}
	now := clock.Now()
	if p.until == 0 {
		p.until = now + int64(wait)
	}
	p.gone = p.until + int64(placeGone)
	for i, c := range f.queue {
		if !f.makes(p, c.tenant, c.Function) {
			continue
		}
		f.queue = slices.Delete(f.queue, i, i+1)
		c.Within, c.worker = time.Duration(c.until-now), id.serial
		if f.taken == nil {
			f.taken = map[uint64]*call{}
		}
		f.taken[c.Call] = c
		p.until, p.gone = 0, c.until+int64(placeGone)
		return c.Put(answer), nil
	}
	if now >= p.until {
		p.until = 0
		return 0, nil
	}
	return 0, &host.Held{Ready: p.ready, Until: p.until}
}

// give ends a call with what its worker says.
// Preconditions: f.mu is held.
func (f *functions) give(serial uint64, r *msg.WorkerRequest) {
	c := f.taken[r.Call]
	if c == nil || c.worker != serial {
		return // its time was up
	}
	delete(f.taken, r.Call)
	c.answer <- msg.ObjectAnswer{Outcome: r.Outcome, Reason: r.Reason, Payload: slices.Clone(r.Answer)}
}
