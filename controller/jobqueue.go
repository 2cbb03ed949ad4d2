package controller

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// The quota of records between map and reduce. A job that reduces has a record here, which its submitter makes before the
// job's own records. The record is first a place in the queue. When the job is admitted, its bytes count against the quota.
//
// Invariant: the bytes of all records that are admitted exceed the quota only if the quota was lowered since. The leader
// alone admits, one record at a time, in a transaction that fails when it leads no more; the next leader reads the records.
// Invariant: only a submitter makes a record, with a number that is new in its tenant. The record of a job is deleted after its runs are freed,
// when there never were runs, or when the memory of the jobs' records is gone with their tree. So a worker that
// was stopped, and goes on after the end of its job, cannot claim bytes for it again.

const (
	maxQueued = 1024 // of one tenant
	// A waiting job holds up later jobs for queueHold after a worker last asked for it.
	queueHold = 10 * time.Second
	// queueAnswer is how long the answer that a job waits holds for other workers that ask, unless a job leaves.
	queueAnswer = 200 * time.Millisecond
	// queueLasts: a place that is not admitted in this time is given up: its submitter may have died before it wrote the job's records.
	queueLasts = delegationMost + 24*time.Hour
)

// jobQueue is what a leader knows of the queue beside its records.
type jobQueue struct {
	clock  atomic.Pointer[func() time.Time] // of tests; nil: time.Now
	mu     sync.Mutex                       // held while the leader admits a job
	making sync.Mutex                       // held while the leader makes a place

	askedMu sync.Mutex         // guards what follows, and is held for no call
	asked   map[string]waiting // by key: jobs that wait
	left    uint64             // how many jobs have left
}

// waiting is the last answer about a job that waits.
type waiting struct {
	at          time.Time // when a worker has asked
	left        uint64    // jobQueue.left before the answer was made
	quota, free uint64
}

// now is the time.
func (q *jobQueue) now() time.Time {
	if f := q.clock.Load(); f != nil {
		return (*f)()
	}
	return time.Now()
}

// queueKey is where the record of a job's place is.
func (c *Controller) queueKey(tenant uint32, job uint64) string {
	return fmt.Sprintf("%sjobqueue/%08x/%020d", c.cfg.Prefix, tenant, job)
}

// place is a record of the queue.
type place struct {
	*quarrypb.QueuedJob
	key      string
	made     int64 // revisions of etcd
	modified int64
}

// queue reads all places, in the order in which they were made.
func (c *Controller) queue(ctx context.Context) ([]place, error) {
	res, err := c.cfg.Etcd.Get(ctx, c.cfg.Prefix+"jobqueue/", clientv3.WithPrefix())
	if err != nil {
		return nil, etcdError(err)
	}
	var all []place
	for _, kv := range res.Kvs {
		q := &quarrypb.QueuedJob{}
		if err := proto.Unmarshal(kv.Value, q); err != nil {
			return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged: %w", kv.Key, err))
		}
		all = append(all, place{q, string(kv.Key), kv.CreateRevision, kv.ModRevision})
	}
	slices.SortFunc(all, func(a, b place) int { return int(a.made - b.made) })
	return all, nil
}

// admitted is the sum of the bytes that count.
func admitted(all []place) (sum uint64) {
	for _, p := range all {
		if p.Admitted {
			sum += p.Bytes
		}
	}
	return sum
}

// shuffleQuota asks the machine.
func (s *service) shuffleQuota(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	res, err := do[quarrypb.SetDefaultsResponse](ctx, s, &quarrypb.SetDefaultsRequest{}, nil)
	if err != nil {
		return 0, err
	}
	return res.Msg.ShuffleBytes, nil
}

// forJob is the tenant of a call about a job there: of a submitter, or of a worker that acts for the submitter of this job.
func (s *service) forJob(ctx context.Context, header http.Header, job uint64) (acting, error) {
	in, err := s.c.acting(ctx, header)
	switch {
	case err != nil:
		return in, err
	case job == 0:
		return in, invalid("job 0: want a number")
	case in.job != 0 && in.job != job:
		return in, denied("%s may not act for job %d", in.caller, job)
	case !in.some(mayWrite):
		return in, denied("%s may only read in tenant %s: a job writes its records and its output there", in.caller, in.name)
	}
	return in, nil
}

// QueueJob gives a job a place. A place of a job of this number that is to do something else is an error: already_exists.
func (s *service) QueueJob(ctx context.Context, r *connect.Request[quarrypb.QueueJobRequest]) (*connect.Response[quarrypb.QueueJobResponse], error) {
	q := r.Msg
	in, err := s.forJob(ctx, r.Header(), q.Job)
	switch {
	case err != nil:
		return nil, err
	case in.job != 0:
		return nil, denied("%s acts for a job: it submits none", rights.From(ctx).Name)
	case len(q.Digest) != 32 || q.Bytes == 0:
		return nil, invalid("job %d: %d bytes and a digest of %d bytes; want more than 0 bytes and a digest of 32 bytes", q.Job, q.Bytes, len(q.Digest))
	}
	quota, err := s.shuffleQuota(ctx)
	if err != nil {
		return nil, err
	}
	if q.Bytes > quota {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the job needs %d MiB between map and reduce, and the quota of all jobs is %d MiB: submit it with a smaller --shuffle, or raise the quota with quarry job quota", q.Bytes>>20, quota>>20))
	}
	s.c.jobQueue.making.Lock() // the leader alone makes places: so maxQueued is exact
	defer s.c.jobQueue.making.Unlock()
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	all, err := s.c.queue(ctx)
	if err != nil {
		return nil, err
	}
	n, key := 0, s.c.queueKey(in.id, q.Job)
	for _, p := range all {
		if p.TenantId == in.id && p.key != key { // a call that is made again finds its own place
			n++
		}
	}
	if n >= maxQueued {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("tenant %s has %d jobs that have not ended, the most there can be: quarry job cancel", in.name, n))
	}
	return s.recordPlace(ctx, &quarrypb.QueuedJob{Job: q.Job, Tenant: in.name, TenantId: in.id, Digest: q.Digest, Bytes: q.Bytes, QueuedUnixMs: s.c.jobQueue.now().UnixMilli()})
}

// recordPlace writes a place that is not there yet.
func (s *service) recordPlace(ctx context.Context, q *quarrypb.QueuedJob) (*connect.Response[quarrypb.QueueJobResponse], error) {
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	value, err := proto.Marshal(q)
	if err != nil {
		return nil, err
	}
	key := s.c.queueKey(q.TenantId, q.Job)
	cmps := append(s.c.whileTenant(q.TenantId), guard(t.key, t.rev), clientv3.Compare(clientv3.CreateRevision(key), "=", 0))
	res, err := s.c.cfg.Etcd.Txn(ctx).If(cmps...).Then(clientv3.OpPut(key, string(value))).Else(clientv3.OpGet(key), clientv3.OpGet(t.key, clientv3.WithKeysOnly())).Commit()
	switch {
	case err != nil:
		return nil, etcdError(err) // twice the same is once
	case res.Succeeded:
		return connect.NewResponse(&quarrypb.QueueJobResponse{}), nil
	}
	if kvs := res.Responses[1].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != t.rev {
		return nil, s.notLeading()
	}
	kvs := res.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return nil, tenantGone(q.TenantId)
	}
	have := &quarrypb.QueuedJob{}
	if proto.Unmarshal(kvs[0].Value, have) != nil || string(have.Digest) != string(q.Digest) {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("job %d of tenant %s has a place in the queue already: quarry job forget gives it up", q.Job, q.Tenant))
	}
	return connect.NewResponse(&quarrypb.QueueJobResponse{}), nil
}

// AdmitJob admits a job in its turn. That it waits is answered from memory where another worker has asked just before.
// Linearizes at: the transaction that marks the record.
func (s *service) AdmitJob(ctx context.Context, r *connect.Request[quarrypb.AdmitJobRequest]) (*connect.Response[quarrypb.AdmitJobResponse], error) {
	in, err := s.forJob(ctx, r.Header(), r.Msg.Job)
	if err != nil {
		return nil, err
	}
	quota, err := s.shuffleQuota(ctx)
	if err != nil {
		return nil, err
	}
	t := s.c.term.Load()
	if t == nil {
		return nil, s.notLeading()
	}
	queue, key := &s.c.jobQueue, s.c.queueKey(in.id, r.Msg.Job)
	out, left := queue.answer(key, quota)
	if out == nil {
		queue.mu.Lock()
		defer queue.mu.Unlock()
		out, left = queue.answer(key, quota) // of a worker that has asked while this one waited for the lock
	}
	if out != nil {
		return connect.NewResponse(out), nil
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	all, err := s.c.queue(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(p place) bool { return p.key == key })
	if i < 0 {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("job %d of tenant %s has no place in the queue", r.Msg.Job, in.name))
	}
	p, used := all[i], admitted(all)
	out = &quarrypb.AdmitJobResponse{Admitted: p.Admitted, QuotaBytes: quota, FreeBytes: quota - min(quota, used)}
	if p.Admitted {
		return connect.NewResponse(out), nil
	}
	if p.Bytes+queue.before(all[:i], quota)+used > quota {
		queue.waits(key, all, waiting{queue.now(), left, quota, out.FreeBytes})
		return connect.NewResponse(out), nil
	}
	p.Admitted = true
	value, err := proto.Marshal(p.QueuedJob)
	if err != nil {
		return nil, err
	}
	res, err := s.c.cfg.Etcd.Txn(ctx).If(guard(t.key, t.rev), clientv3.Compare(clientv3.ModRevision(key), "=", p.modified)).Then(clientv3.OpPut(key, string(value))).Commit()
	switch {
	case err != nil:
		return nil, etcdError(err) // a worker asks again
	case !res.Succeeded: // another leader, or the job has left
		return nil, s.notLeading()
	}
	out.Admitted, out.FreeBytes = true, out.FreeBytes-min(out.FreeBytes, p.Bytes)
	return connect.NewResponse(out), nil
}

// answer is that a job waits, if that was found out just before; else nil. left is for the answer that the caller finds out.
func (q *jobQueue) answer(key string, quota uint64) (out *quarrypb.AdmitJobResponse, left uint64) {
	q.askedMu.Lock()
	defer q.askedMu.Unlock()
	w, ok := q.asked[key]
	if !ok || w.left != q.left || w.quota != quota || q.now().Sub(w.at) >= queueAnswer {
		return nil, q.left
	}
	return &quarrypb.AdmitJobResponse{QuotaBytes: quota, FreeBytes: w.free}, q.left
}

// before adds up the bytes of earlier jobs that wait and have a worker, until they exceed the quota. A job that needs more than the quota, which was
// lowered since, cannot be admitted and holds up no other.
func (q *jobQueue) before(earlier []place, quota uint64) (sum uint64) {
	q.askedMu.Lock()
	defer q.askedMu.Unlock()
	for _, p := range earlier {
		w, asked := q.asked[p.key]
		if asked && !p.Admitted && p.Bytes <= quota && q.now().Sub(w.at) <= queueHold {
			if sum += p.Bytes; sum > quota {
				break
			}
		}
	}
	return sum
}

// waits records that a worker has asked for a job that waits, and forgets jobs that do not.
func (q *jobQueue) waits(key string, all []place, w waiting) {
	q.askedMu.Lock()
	defer q.askedMu.Unlock()
	now := map[string]waiting{key: w}
	for _, p := range all {
		if known, ok := q.asked[p.key]; ok && !p.Admitted && p.key != key {
			now[p.key] = known
		}
	}
	q.asked = now
}

// leaves records that jobs have left: what was answered before may not hold any more.
func (q *jobQueue) leaves() {
	q.askedMu.Lock()
	defer q.askedMu.Unlock()
	q.left++
}

// LeaveJobQueue deletes the record of a place.
func (s *service) LeaveJobQueue(ctx context.Context, r *connect.Request[quarrypb.LeaveJobQueueRequest]) (*connect.Response[quarrypb.LeaveJobQueueResponse], error) {
	in, err := s.forJob(ctx, r.Header(), r.Msg.Job)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	if err := s.lead(ctx, clientv3.OpDelete(s.c.queueKey(in.id, r.Msg.Job))); err != nil {
		return nil, err
	}
	s.c.jobQueue.leaves()
	return connect.NewResponse(&quarrypb.LeaveJobQueueResponse{}), nil
}

// ListJobQueue answers how much of the quota is used by all tenants, and the places of the caller's tenant.
func (s *service) ListJobQueue(ctx context.Context, r *connect.Request[quarrypb.ListJobQueueRequest]) (*connect.Response[quarrypb.ListJobQueueResponse], error) {
	in, err := s.c.acting(ctx, r.Header())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	quota, err := s.shuffleQuota(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.c.queue(ctx)
	if err != nil {
		return nil, err
	}
	out := &quarrypb.ListJobQueueResponse{QuotaBytes: quota, UsedBytes: admitted(all)}
	for _, p := range all {
		if p.TenantId == in.id {
			out.Jobs = append(out.Jobs, p.QueuedJob)
		}
	}
	return connect.NewResponse(out), nil
}

// tendQueue deletes the places of tenants that are gone, with all their jobs' memory, and those that have waited too long. The
// places are read before the tenants: a tenant is made before its jobs.
func (c *Controller) tendQueue(ctx context.Context) error {
	c.jobQueue.mu.Lock() // none is admitted meanwhile
	defer c.jobQueue.mu.Unlock()
	all, err := c.queue(ctx)
	if err != nil || len(all) == 0 {
		return err
	}
	tenants, err := c.tenantList(ctx, true)
	if err != nil {
		return err
	}
	s := &service{c: c}
	for _, p := range all {
		there := p.TenantId == 0 || slices.ContainsFunc(tenants, func(t *quarrypb.Tenant) bool { return t.Id == p.TenantId })
		if there && (p.Admitted || c.jobQueue.now().Sub(time.UnixMilli(p.QueuedUnixMs)) < queueLasts) {
			continue
		}
		if err := s.lead(ctx, clientv3.OpDelete(p.key)); err != nil {
			return err
		}
		c.jobQueue.leaves()
	}
	return nil
}
