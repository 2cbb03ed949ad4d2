package controller

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// term is one leadership: the machine, and what carries out its actions. The goroutine of run
// alone steps the machine; RPCs reach it through events.
type term struct {
	c       *Controller
	machine *state.Machine                    // of run's goroutine
	first   []state.Action                    // of New, carried out when run begins
	key     string                            // of the election
	rev     int64                             // creation revision of that key: the number of the term
	lease   clientv3.LeaseID                  // of that key
	etcdTTL time.Duration                     // of the lease
	http    *http.Client                      // to agents
	leased  atomic.Int64                      // until then the lease is there, as etcd has said last
	cluster [16]byte                          // its uuid
	keys    atomic.Pointer[state.Credentials] // as of the machine's latest turn
	events  chan state.Event                  // for the machine; at most maxEvents wait
	over    chan struct{}                     // closed when the term ends
	why     error                             // good once over is closed

	mu      sync.Mutex                   // guards waiters
	waiters map[uint64]chan state.Answer // of requests without an answer, by number
	lastID  atomic.Uint64                // number of the last request
	round   atomic.Pointer[round]        // of the table
	names   nameCount
	pushes  namePushes
	wg      sync.WaitGroup // of calls to agents and transactions under way
	turns   atomic.Int64   // of run; hung once watchTurns has ended the term
	end     sync.Once      // closes over
}

// now is the machine's time. It goes on while the host sleeps: a leader that wakes
// up must know that its time is over.
func now() int64 { return clock.Raw() }

// maxEvents bounds what waits for the machine; further requests wait at the door.
const maxEvents = 4096

const (
	// Nodes show signs of life more often than clients: the death of one is to be
	// seen, and a region open again, within a second.
	beatsInLease     = 12
	mostCalm         = 2 * time.Second // between them while their pulse is heard, which then tells sooner of a death
	minNodeHeartbeat = 50 * time.Millisecond
	scrubEvery       = 2 * time.Second
	reclaimEvery     = 5 * time.Second // at once where there is no room for another region
)

// nodeHeartbeat is the time in which a node sends two heartbeats.
func (c *Controller) nodeHeartbeat() time.Duration {
	return max(c.cfg.Lease/beatsInLease, minNodeHeartbeat)
}

// calmHeartbeat is the time between the heartbeats of a node whose pulse is heard.
func (c *Controller) calmHeartbeat() time.Duration { return min(c.cfg.Lease*2/3, mostCalm) }

// newTerm makes the machine of all the records.
// Preconditions: no leader before this one can still answer.
func (c *Controller) newTerm(ctx context.Context, e *concurrency.Election, lease clientv3.LeaseID, records []state.Record) (*term, error) {
	t := &term{c: c, key: e.Key(), rev: e.Rev(), lease: lease, etcdTTL: c.cfg.LeaderTTL,
		http:   &http.Client{Transport: c.cfg.Wire.Transport(&http.Transport{TLSClientConfig: c.cfg.AgentTLS, MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute})},
		events: make(chan state.Event, maxEvents), over: make(chan struct{}), waiters: map[uint64]chan state.Answer{}}
	t.round.Store(newRound())
	random := make([]byte, state.RandomBytes)
	rand.Read(random)
	var err error
	t.machine, t.first, err = state.New(state.Config{
		Lease: c.cfg.Lease, NodeHeartbeat: c.nodeHeartbeat(), CalmHeartbeat: c.calmHeartbeat(), RegionBytes: c.cfg.RegionBytes, Version: Version,
		ReplaceAfter: c.cfg.ReplaceAfter, ProbeTimeout: c.cfg.ProbeTimeout, ScrubEvery: scrubEvery, ReclaimEvery: reclaimEvery, RebuildBytesPerSecond: c.cfg.RebuildBytesPerSecond,
	}, uint64(t.rev), now(), records, random)
	if err != nil {
		return nil, err
	}
	t.cluster = [16]byte(t.machine.Cluster())
	t.keys.Store(t.machine.Credentials())
	// Requests come after the machine knows that it leads: before, it would refuse them.
	_ = t.renew(ctx) // without it, extend answers with a time that is over
	lead, ok := t.extend(ctx)
	if !ok {
		return nil, errors.New("etcd does not extend the lease of the election")
	}
	t.first = append(t.first, t.machine.Step(now(), lead)...)
	return t, nil
}

// records reads the state's records, a page at a time, at one revision.
func (c *Controller) records(ctx context.Context) (out []state.Record, err error) {
	prefix := c.cfg.Prefix
	var at int64
	for _, p := range state.Prefixes {
		from, end := prefix+p, clientv3.GetPrefixRangeEnd(prefix+p)
		for {
			opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(1000), clientv3.WithSort(clientv3.SortByKey, clientv3.SortAscend)}
			if at > 0 {
				opts = append(opts, clientv3.WithRev(at))
			}
			res, err := c.cfg.Etcd.Get(ctx, from, opts...)
			if err != nil {
				return nil, fmt.Errorf("etcd: %w", err)
			}
			if at == 0 {
				at = res.Header.Revision // the header has the newest revision of the store
			}
			for _, kv := range res.Kvs {
				out = append(out, state.Record{Key: strings.TrimPrefix(string(kv.Key), prefix), Value: kv.Value, Revision: uint64(kv.ModRevision)})
				from = string(kv.Key) + "\x00"
			}
			if !res.More {
				break
			}
		}
	}
	return out, nil
}

// run steps the machine until the leadership is over.
func (t *term) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer t.wg.Wait()
	defer cancel(nil)
	t.wg.Go(func() { t.keep(ctx) })
	t.wg.Go(func() { t.renewOften(ctx, cancel) })
	t.wg.Go(func() { t.watchTurns(ctx) })
	pace := newPace(t.c.nodeHeartbeat() / 2)
	defer pace.timer.Stop()
	if err := t.act(ctx, t.first); err != nil {
		return err
	}
	for {
		var ev state.Event
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-pace.timer.C:
			pace.wait()
			ev = state.Tick{}
		case ev = <-t.events:
		}
		if !t.turn() {
			return errHung
		}
		actions := t.machine.Step(now(), ev)
		t.keys.Store(t.machine.Credentials())
		pace.stepped(now(), state.Active(ev, actions))
		if err := t.act(ctx, actions); err != nil {
			return err
		}
	}
}

// busyFor is how long the machine's time passes in short ticks after the last thing that went on.
const busyFor = int64(time.Second)

// pace ticks often while something is going on.
type pace struct {
	timer *time.Timer   // fires at the next tick
	slow  time.Duration // between ticks while it is calm
	calm  bool          // nothing has gone on for busyFor
	until int64         // ns; it becomes calm then
}

// newPace makes a pace that becomes slow, but not slower than CalmTick.
func newPace(slow time.Duration) *pace {
	return &pace{timer: time.NewTimer(state.TickEvery), slow: max(state.TickEvery, min(slow, state.CalmTick)), until: now() + busyFor}
}

// wait begins the wait for the next tick.
func (p *pace) wait() {
	if p.calm {
		p.timer.Reset(clock.Aligned(p.slow))
	} else {
		p.timer.Reset(state.TickEvery)
	}
}

// stepped sets the pace after a step.
func (p *pace) stepped(now int64, busy bool) {
	if busy {
		p.until = now + busyFor
	}
	calm := now >= p.until
	if calm == p.calm {
		return
	}
	p.calm = calm
	p.wait()
}

// hung is the value of turns when the term has ended because run stood still.
const hung = -1

const (
	hangLook  = 3 * clock.Grain
	hangLooks = 12 // in a row without a turn of run, which makes one at least every state.TickEvery
)

var errHung = fmt.Errorf("the leader's machine has stood still for %v", hangLooks*hangLook)

// turn counts a turn of run; false if the term is over because there was none for too long.
func (t *term) turn() bool {
	for {
		n := t.turns.Load()
		if n == hung {
			return false
		}
		if t.turns.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// watchTurns ends the term when run stands still: in a step or in an action, such as a write to
// a log that blocks. Without it the leader would renew its lease and answer probes without
// leading. It counts its own looks and no time, because a process that was suspended as a whole
// has missed both.
func (t *term) watchTurns(ctx context.Context) {
	last, missed := t.turns.Load(), 0
	for missed < hangLooks {
		select {
		case <-ctx.Done():
			return
		case <-time.After(clock.Aligned(hangLook)):
		}
		n := t.turns.Load()
		if missed++; n != last {
			last, missed = n, 0
		}
	}
	// run executes no further step after this, even if it goes on.
	if t.turns.CompareAndSwap(last, hung) {
		t.c.hung(t)
	}
}

// repeat calls f after wait, and again after what it returns, until the context ends or the term
// hangs.
func (t *term) repeat(ctx context.Context, wait time.Duration, f func() time.Duration) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if t.turns.Load() == hung {
			return
		}
		wait = f()
	}
}

// keep extends the leadership and tells the machine until when it leads.
func (t *term) keep(ctx context.Context) {
	t.repeat(ctx, clock.Aligned(keepEvery), func() time.Duration {
		lead, ok := t.extend(ctx)
		if !ok {
			return keepAgain
		}
		t.send(ctx, lead)
		return clock.Aligned(keepEvery)
	})
}

// extend extends the leadership once, counted from before the request. False: it is over, or not
// known to go on.
//
// A linearizable read of the election key shows that the key is still this term's. The renewal
// of the lease does not: a partitioned member of etcd that has not noticed the end of its leadership renews a lease
// that the others have revoked.
func (t *term) extend(ctx context.Context) (state.Lead, bool) {
	ctx, cancel := context.WithTimeout(ctx, keepTime)
	defer cancel()
	sent := now()
	res, err := t.c.cfg.Etcd.Get(ctx, t.key)
	if err != nil || len(res.Kvs) == 0 || res.Kvs[0].CreateRevision != t.rev {
		return state.Lead{}, false
	}
	t.pushes.begin(res.Header.Revision) // the first time behind all changes of former leaders
	return state.Lead{Until: min(sent+int64(t.c.cfg.hold()), t.leased.Load())}, true
}

// renewOften renews the lease of the election key every renewEvery. A lease that etcd does not have
// any more ends the term at once.
func (t *term) renewOften(ctx context.Context, end context.CancelCauseFunc) {
	t.repeat(ctx, clock.Aligned(renewEvery), func() time.Duration {
		if errors.Is(t.renew(ctx), rpctypes.ErrLeaseNotFound) {
			end(errNoLease)
		}
		return clock.Aligned(renewEvery)
	})
}

// renew extends the lease once, and stores in leased until when it lasts at least.
func (t *term) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, t.etcdTTL/2)
	defer cancel()
	sent := now()
	res, err := t.c.cfg.Etcd.KeepAliveOnce(ctx, t.lease)
	if err == nil && res.TTL > 0 {
		t.leased.Store(sent + int64(time.Duration(res.TTL)*time.Second-leaseMargin))
	}
	return err
}

// send hands an event to the machine; false if the term ended first.
func (t *term) send(ctx context.Context, ev state.Event) bool {
	select {
	case t.events <- ev:
		return true
	case <-t.over:
	case <-ctx.Done():
	}
	return false
}

// act carries actions out, in order.
func (t *term) act(ctx context.Context, actions []state.Action) error {
	for _, a := range actions {
		switch a := a.(type) {
		case state.Commit:
			t.wg.Go(func() { t.send(ctx, t.c.counted.commit(func() state.Event { return t.commit(ctx, a) })) })
		case state.Call:
			t.wg.Go(func() {
				if a.After > 0 {
					select {
					case <-time.After(time.Duration(a.After)):
					case <-ctx.Done():
						return
					}
				}
				t.send(ctx, t.c.counted.call(a.Msg, func() state.Event { return t.call(ctx, a) }))
			})
		case state.Answer:
			t.mu.Lock()
			w := t.waiters[a.Waiter]
			delete(t.waiters, a.Waiter)
			t.mu.Unlock()
			if w != nil {
				w <- a // has room for one
			}
		case state.TableChanged:
			close(t.round.Swap(newRound()).over)
			t.c.counted.tables.Add(1)
		case state.Note:
			t.c.cfg.Logger.Info("controller: " + a.Text)
		case state.StepDown:
			return fmt.Errorf("step down: %w", a.Err)
		}
	}
	return nil
}

// commit writes one transaction, guarded by the leader's key and the records'
// previous revisions (hazard 14).
func (t *term) commit(ctx context.Context, a state.Commit) state.Event {
	cmps := []clientv3.Cmp{guard(t.key, t.rev)}
	reads := []clientv3.Op{clientv3.OpGet(t.key)}
	var ops []clientv3.Op
	for _, op := range a.Ops {
		key := t.c.cfg.Prefix + op.Key
		cmps = append(cmps, clientv3.Compare(clientv3.ModRevision(key), "=", int64(op.Prev)))
		reads = append(reads, clientv3.OpGet(key))
		if op.Empty != "" { // also where there is none: its revision counts as 0
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(t.c.cfg.Prefix+op.Empty), "=", 0).WithPrefix())
		}
		if op.Value == nil {
			ops = append(ops, clientv3.OpDelete(key))
		} else {
			ops = append(ops, clientv3.OpPut(key, string(op.Value)))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, t.etcdTTL)
	defer cancel()
	for again := false; ; again = true {
		res, err := t.c.cfg.Etcd.Txn(ctx).If(cmps...).Then(ops...).Else(reads...).Commit()
		switch {
		case errors.Is(err, rpctypes.ErrTimeoutDueToLeaderFail) && ctx.Err() == nil:
			continue
		case err != nil:
			return state.Failed{Err: fmt.Errorf("etcd transaction: %w", err)}
		case res.Succeeded:
			return state.Committed{Revision: uint64(res.Header.Revision)}
		}
		if again {
			if rev, done := t.wrote(a, res); done {
				return state.Committed{Revision: rev}
			}
		}
		return state.Failed{Err: errors.New("a record was changed by another writer, or the leadership is over")}
	}
}

// wrote says whether an earlier try of a transaction, whose answer was lost, has taken effect, and
// at which revision. res are the records as the last try found them.
//
// While this leadership lasts, no other process writes the records. So a record that has a newer
// revision and the value that was to be written comes from an earlier try.
func (t *term) wrote(a state.Commit, res *clientv3.TxnResponse) (rev uint64, done bool) {
	found := func(i int) *mvccpb.KeyValue {
		if kvs := res.Responses[i].GetResponseRange().Kvs; len(kvs) > 0 {
			return kvs[0]
		}
		return nil
	}
	if lead := found(0); lead == nil || lead.CreateRevision != t.rev {
		return 0, false
	}
	rev = uint64(res.Header.Revision)
	for i, op := range a.Ops {
		kv := found(i + 1)
		switch {
		case kv == nil && op.Value == nil && op.Prev != 0:
		case kv == nil || op.Value == nil || uint64(kv.ModRevision) == op.Prev || !bytes.Equal(kv.Value, op.Value):
			return 0, false
		default:
			rev = uint64(kv.ModRevision)
		}
	}
	return rev, true
}

// agent calls the agent of a node, at a URL.
func (t *term) agent(node uint32, url string) quarrypbconnect.AgentClient {
	return quarrypbconnect.NewAgentClient(agentauth.Client(t.http, t.keys.Load().Signer, agentauth.Node{Cluster: t.cluster, Number: node}), url)
}

// call asks an agent.
func (t *term) call(ctx context.Context, a state.Call) state.Event {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(a.Timeout))
	defer cancel()
	cl := t.agent(a.Node, a.URL)
	var msg proto.Message
	var err error
	switch m := a.Msg.(type) {
	case *quarrypb.HostRegionRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.HostRegion)
	case *quarrypb.OpenRegionRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.OpenRegion)
	case *quarrypb.CloseRegionRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.CloseRegion)
	case *quarrypb.DropRegionRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.DropRegion)
	case *quarrypb.FenceRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.Fence)
	case *quarrypb.WorkRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.Work)
	case *quarrypb.PingRequest:
		msg, err = ask(ctx, a.Incarnation, m, cl.Ping)
	default:
		err = fmt.Errorf("no agent call takes a %T", a.Msg)
	}
	r := state.Reply{Call: a.ID, Msg: msg, Err: err}
	if err != nil {
		r.Msg = nil
		code := connect.CodeOf(err)
		r.NoSpace = code == connect.CodeResourceExhausted
		r.NoListener = errors.Is(err, syscall.ECONNREFUSED)
		// These codes come from the agent itself; the others from the way to it.
		r.Refused = code == connect.CodeInvalidArgument || code == connect.CodeFailedPrecondition || code == connect.CodeNotFound ||
			code == connect.CodeAlreadyExists || code == connect.CodeResourceExhausted || code == connect.CodePermissionDenied || code == connect.CodeAborted
	}
	return r
}

// ask calls the incarnation of a node that is meant; 0: whichever answers.
func ask[Q, A any](ctx context.Context, incarnation uint64, q *Q, method func(context.Context, *connect.Request[Q]) (*connect.Response[A], error)) (proto.Message, error) {
	r := connect.NewRequest(q)
	if incarnation != 0 {
		r.Header().Set(quarrypb.IncarnationHeader, strconv.FormatUint(incarnation, 10))
	}
	res, err := method(ctx, r)
	if err != nil {
		return nil, err
	}
	return any(res.Msg).(proto.Message), nil
}

// errOver: the term ended before there was an answer.
var errOver = errors.New("the leadership changed; whether it was done is unknown")

// ask puts a request to the machine and waits for the answer.
func (t *term) ask(ctx context.Context, msg any, random []byte) (any, error) {
	id := t.lastID.Add(1)
	w := make(chan state.Answer, 1)
	t.mu.Lock()
	t.waiters[id] = w
	t.mu.Unlock()
	if !t.send(ctx, state.Ask{Waiter: id, Msg: msg, Random: random}) {
		return nil, connect.NewError(connect.CodeUnavailable, errOver)
	}
	select {
	case a := <-w:
		if a.Err != nil {
			return nil, a.Err
		}
		return a.Msg, nil
	case <-t.over:
		return nil, connect.NewError(connect.CodeUnavailable, errOver)
	case <-ctx.Done():
		t.mu.Lock()
		delete(t.waiters, id)
		t.mu.Unlock()
		go t.send(context.WithoutCancel(ctx), state.Cancel{Waiter: id})
		return nil, connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
}

// close answers all waiting requests that the term is over.
func (t *term) close(err error) {
	t.end.Do(func() {
		t.why = err
		close(t.over)
		t.http.CloseIdleConnections()
	})
}
