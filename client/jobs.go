package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Jobs makes the calls of controllers by which workers act with the rights of a job's submitter. It is for
// package coproc/job; programs submit jobs with that. Safe for concurrent use.
type Jobs struct {
	cfg     Config
	control *controllerCalls
}

// Jobs are those of the Client's tenant. They close with it.
func (c *Client) Jobs() *Jobs { return &Jobs{c.cfg, c.control} }

// NewJobs makes calls without a session: a worker opens one for each job, with Connect. It connects
// to no controller yet.
func NewJobs(cfg Config) (*Jobs, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Jobs{cfg, newControllerCalls(cfg)}, nil
}

// Close closes idle connections of a NewJobs.
func (j *Jobs) Close() { j.control.close() }

// Worker is a process that runs parts of jobs.
type Worker struct {
	Name string
	Node string // beside which it runs; "" for none
	Host string
	// Plugins that it has, JSON that controllers pass on.
	Plugins []byte
}

// Delegation lets workers act for the submitter of a job, in its tenant and with its rights.
type Delegation struct {
	Job       uint64
	Tenant    string
	Submitter string
	// Digest of what the job is to do, from the submitter.
	Digest  []byte
	Expires time.Time

	grants []*quarrypb.Grant // none: all rights in the tenant
}

// MayWrite says whether the submitter may change what a name of its tenant stands for. Controllers check the
// right to look a name up and to make one; a session that may write can change all memory of the tenant, so
// a worker asks this before it changes a tree for a job.
func (d *Delegation) MayWrite(name string) bool {
	return len(d.grants) == 0 || slices.ContainsFunc(d.grants, func(g *quarrypb.Grant) bool {
		return slices.Contains(g.Rights, quarrypb.Right_RIGHT_WRITE) && strings.HasPrefix(name, g.Prefix)
	})
}

// Same says whether two delegations allow the same.
func (d *Delegation) Same(o *Delegation) bool {
	return d.Job == o.Job && d.Tenant == o.Tenant && d.Submitter == o.Submitter && slices.Equal(d.Digest, o.Digest) && d.Expires.Equal(o.Expires) &&
		slices.EqualFunc(d.grants, o.grants, func(a, b *quarrypb.Grant) bool { return proto.Equal(a, b) })
}

// Delegate lets workers act for this program in one job of its tenant, for a time in seconds; 0 means the
// controllers' default, a day. digest has 32 bytes. needed is false in a cluster without tokens and
// certificates, where nothing is recorded.
//
// Errors: *connect.Error of a refusal; ErrUnreachable.
func (j *Jobs) Delegate(ctx context.Context, job uint64, digest []byte, lasts time.Duration) (needed bool, err error) {
	d, err := request(j.control, ctx, &quarrypb.DelegateJobRequest{Job: job, Digest: digest, LastsS: uint32(lasts / time.Second)}, quarrypbconnect.ControllerClient.DelegateJob)
	return d.GetJob() != 0, err
}

// End ends a delegation: workers open no session for the job any more. With revoke, no verb of a
// worker's session for the job changes a byte when it returns; else workers close their sessions, and
// the controllers end in some seconds those that they do not. There may be no such delegation.
func (j *Jobs) End(ctx context.Context, job uint64, revoke bool) error {
	_, err := request(j.control, ctx, &quarrypb.EndDelegationRequest{Job: job, Revoke: revoke}, quarrypbconnect.ControllerClient.EndDelegation)
	return err
}

// Queue gives a job of the program's tenant a place in the queue for the cluster's quota of records between map and reduce. digest
// has 32 bytes.
//
// Errors: *connect.Error of a refusal: CodeAlreadyExists for a number that has a place for something else, CodeResourceExhausted for
// more bytes than the quota; ErrUnreachable.
func (j *Jobs) Queue(ctx context.Context, job uint64, digest []byte, bytes uint64) error {
	_, err := request(j.control, ctx, &quarrypb.QueueJobRequest{Job: job, Digest: digest, Bytes: bytes}, quarrypbconnect.ControllerClient.QueueJob)
	return err
}

// Admit asks whether a job that has a place may begin: its bytes count against the quota from then on, until it leaves.
//
// Errors: *connect.Error, CodeNotFound for a job without a place; ErrUnreachable.
func (j *Jobs) Admit(ctx context.Context, job uint64) (admitted bool, err error) {
	res, err := request(j.control, ctx, &quarrypb.AdmitJobRequest{Job: job}, quarrypbconnect.ControllerClient.AdmitJob)
	return res.GetAdmitted(), err
}

// Leave gives up the place of a job, and its bytes. There may be no such place.
// Preconditions: what the job has written between map and reduce is freed.
func (j *Jobs) Leave(ctx context.Context, job uint64) error {
	_, err := request(j.control, ctx, &quarrypb.LeaveJobQueueRequest{Job: job}, quarrypbconnect.ControllerClient.LeaveJobQueue)
	return err
}

// Quota is what jobs of the cluster may have between map and reduce, in bytes of records, and the jobs that use it.
type Quota struct {
	Bytes uint64  `json:"quota_bytes"` // for all jobs of all tenants
	Used  uint64  `json:"used_bytes"`  // by those that are admitted; above Bytes only where the quota was lowered since
	Jobs  []Place `json:"jobs"`        // of the program's tenant, in the order of submission
}

// Free is what the quota has left.
func (q Quota) Free() uint64 { return q.Bytes - min(q.Bytes, q.Used) }

// Place of a job in the queue for the quota.
type Place struct {
	Job      uint64 `json:"job"`      // number in its tenant
	Bytes    uint64 `json:"bytes"`    // that it may have
	Admitted bool   `json:"admitted"` // else it waits
}

// Quota reads the queue.
func (j *Jobs) Quota(ctx context.Context) (Quota, error) {
	res, err := request(j.control, ctx, &quarrypb.ListJobQueueRequest{}, quarrypbconnect.ControllerClient.ListJobQueue)
	return QuotaOf(res), err
}

// QuotaOf is the answer of a controller.
func QuotaOf(res *quarrypb.ListJobQueueResponse) Quota {
	q := Quota{Bytes: res.GetQuotaBytes(), Used: res.GetUsedBytes(), Jobs: []Place{}}
	for _, p := range res.GetJobs() {
		q.Jobs = append(q.Jobs, Place{p.Job, p.Bytes, p.Admitted})
	}
	return q
}

// Poll tells the controllers that a worker is there, which they believe for ten seconds, and
// returns the jobs that it may act for, oldest first. all is true for a caller that needs no
// delegation: anyone in a cluster without tokens and certificates, and operators.
func (j *Jobs) Poll(ctx context.Context, w Worker) (jobs []*Delegation, all bool, err error) {
	res, err := request(j.control, ctx, &quarrypb.PollJobsRequest{Worker: &quarrypb.Worker{Name: w.Name, Node: w.Node, Host: w.Host, Plugins: w.Plugins}}, quarrypbconnect.ControllerClient.PollJobs)
	if err != nil {
		return nil, false, fmt.Errorf("jobs: %w", err)
	}
	for _, d := range res.Jobs {
		jobs = append(jobs, &Delegation{Job: d.Job, Tenant: d.Tenant, Submitter: d.Submitter, Digest: d.Digest, Expires: time.UnixMilli(d.ExpiresUnixMs), grants: d.Grants})
	}
	return jobs, res.All, nil
}

// Workers are those that poll and serve the program's tenant.
func (j *Jobs) Workers(ctx context.Context) ([]Worker, error) {
	res, err := request(j.control, ctx, &quarrypb.ListWorkersRequest{}, quarrypbconnect.ControllerClient.ListWorkers)
	if err != nil {
		return nil, err
	}
	var out []Worker
	for _, w := range res.Workers {
		out = append(out, Worker{Name: w.Name, Node: w.Node, Host: w.Host, Plugins: w.Plugins})
	}
	return out, nil
}

// Connect opens a session for a job, with the rights of its submitter. The Client's names and memory
// are those of the submitter's tenant. Errors are those of Connect.
func (j *Jobs) Connect(ctx context.Context, job uint64, tenant string) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if job == 0 || tenant == "" {
		return nil, errors.New("client: a session for a job without a number or a tenant")
	}
	cfg := j.cfg
	cfg.Tenant, cfg.job = tenant, job
	return Connect(ctx, cfg)
}
