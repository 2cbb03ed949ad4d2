package controller_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

func queueJob(job, bytes uint64) *quarrypb.QueueJobRequest {
	return &quarrypb.QueueJobRequest{Job: job, Bytes: bytes, Digest: make([]byte, 32)}
}

// Calls side by side admit as many jobs as the quota has bytes for, of all tenants together. The next leader counts the same, and a job
// that has left is not admitted again.
func TestTheQuotaOfJobsIsExact(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd, Name: "one"})
	lead(t, c)
	do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: "shop"})
	shop := in(c, "shop")
	quota := uint64(100)
	do(t, rpc.SetDefaults, &quarrypb.SetDefaultsRequest{ShuffleBytes: &quota})
	refused(t, rpc.QueueJob, queueJob(1, 101), connect.CodeResourceExhausted, "the quota of all jobs")
	refused(t, rpc.QueueJob, &quarrypb.QueueJobRequest{Job: 1, Bytes: 1}, connect.CodeInvalidArgument, "32 bytes")
	refused(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: 1}, connect.CodeNotFound, "job 1 of tenant default has no place")

	const jobs, each = 12, 15 // 6 of them fit
	var all sync.WaitGroup
	var mu sync.Mutex
	admitted := map[string]bool{}
	for i := range uint64(jobs) {
		rpc, name := rpc, "default"
		if i%2 == 1 {
			rpc, name = shop, "shop"
		}
		do(t, rpc.QueueJob, queueJob(i+1, each))
		do(t, rpc.QueueJob, queueJob(i+1, each))
		for range 2 {
			all.Go(func() {
				a, err := try(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: i + 1})
				switch code := connect.CodeOf(err); {
				case err == nil && a.Admitted:
					mu.Lock()
					defer mu.Unlock()
					admitted[fmt.Sprint(name, i+1)] = true
				case err != nil && code != connect.CodeUnavailable && code != connect.CodeDeadlineExceeded: // etcd of a starved machine
					t.Error(err)
				}
			})
		}
	}
	all.Wait()
	require.LessOrEqual(t, len(admitted), 6)
	for i := range uint64(jobs) { // what waits behind jobs that were admitted out of their order
		if i%2 == 0 {
			do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: i + 1})
		} else {
			do(t, shop.AdmitJob, &quarrypb.AdmitJobRequest{Job: i + 1})
		}
	}
	q := do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{})
	require.EqualValues(t, 6*each, q.UsedBytes)
	require.Len(t, q.Jobs, jobs/2, "those of the tenant")
	other := queueJob(1, each)
	other.Digest = []byte("another job, of the same number.")
	refused(t, rpc.QueueJob, other, connect.CodeAlreadyExists, "quarry job forget")

	require.NoError(t, c.Close())
	c, rpc = start(t, controller.Config{Etcd: etcd, Name: "two"})
	lead(t, c)
	q = do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{})
	require.EqualValues(t, 6*each, q.UsedBytes)
	for _, p := range q.Jobs {
		a := do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: p.Job})
		require.Equal(t, p.Admitted, a.Admitted)
		require.EqualValues(t, 10, a.FreeBytes)
	}
	for i := range uint64(jobs) {
		for range 2 {
			do(t, rpc.LeaveJobQueue, &quarrypb.LeaveJobQueueRequest{Job: i + 1})
			do(t, in(c, "shop").LeaveJobQueue, &quarrypb.LeaveJobQueueRequest{Job: i + 1})
		}
		refused(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: i + 1}, connect.CodeNotFound, "no place")
	}
	require.Zero(t, do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{}).UsedBytes)
}

// Smaller jobs do not overtake a large one that waits, and a job that no worker asks for does not hold up the jobs behind it.
func TestJobsAreAdmittedInOrder(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	clock := stopped(c)
	lead(t, c)
	quota := uint64(100)
	do(t, rpc.SetDefaults, &quarrypb.SetDefaultsRequest{ShuffleBytes: &quota})
	for job, bytes := range map[uint64]uint64{1: 50, 9: 100} {
		do(t, rpc.QueueJob, queueJob(job, bytes))
	}
	do(t, rpc.QueueJob, queueJob(2, 80))
	do(t, rpc.QueueJob, queueJob(3, 20))
	admit := func(job uint64) bool { return do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: job}).Admitted }
	require.True(t, admit(1))
	require.False(t, admit(2), "50 are free")
	require.False(t, admit(3), "job 2 waits for them")
	do(t, rpc.LeaveJobQueue, &quarrypb.LeaveJobQueueRequest{Job: 1})
	require.True(t, admit(3), "both fit, and a job has left since the last answer")
	require.True(t, admit(2))

	do(t, rpc.QueueJob, queueJob(4, 90))
	do(t, rpc.QueueJob, queueJob(5, 30))
	do(t, rpc.QueueJob, queueJob(6, 30))
	do(t, rpc.LeaveJobQueue, &quarrypb.LeaveJobQueueRequest{Job: 3})
	do(t, rpc.LeaveJobQueue, &quarrypb.LeaveJobQueueRequest{Job: 2})
	do(t, rpc.QueueJob, queueJob(7, 20))
	require.True(t, admit(7))
	require.False(t, admit(4), "80 are free")
	require.False(t, admit(5), "job 4 waits")
	clock.Add(int64(controller.QueueHold) + 1)
	require.True(t, admit(5), "no worker has asked for job 4 for a time")
	require.False(t, admit(4))
	quota = 80
	do(t, rpc.SetDefaults, &quarrypb.SetDefaultsRequest{ShuffleBytes: &quota})
	require.False(t, admit(4), "more than the quota, which was lowered")
	require.True(t, admit(6), "job 4 can never be admitted, and holds up no other")
}

// stopped has the queue of jobs go by a clock that the test moves.
func stopped(c *controller.Controller) *atomic.Int64 {
	clock := &atomic.Int64{}
	clock.Store(time.Now().UnixNano())
	controller.SetJobClock(c, func() time.Time { return time.Unix(0, clock.Load()) })
	return clock
}

// That a job waits is answered from memory for a moment, also to other workers; not when a job has left, or the quota has changed.
func TestAJobThatWaitsIsNotReadEachTime(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	clock := stopped(c)
	lead(t, c)
	quota := uint64(100)
	do(t, rpc.SetDefaults, &quarrypb.SetDefaultsRequest{ShuffleBytes: &quota})
	do(t, rpc.QueueJob, queueJob(1, 60))
	do(t, rpc.QueueJob, queueJob(2, 60))
	admit := func(job uint64) *quarrypb.AdmitJobResponse {
		return do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: job})
	}
	require.True(t, admit(1).Admitted)
	first := admit(2)
	require.False(t, first.Admitted)
	require.EqualValues(t, 40, first.FreeBytes)
	place := placeOf(t, etcd, 2)
	_, err := etcd.Delete(t.Context(), string(place.Key))
	require.NoError(t, err)
	again := admit(2)
	require.False(t, again.Admitted)
	require.EqualValues(t, 40, again.FreeBytes)
	require.EqualValues(t, 100, again.QuotaBytes)
	clock.Add(int64(controller.QueueAnswer))
	refused(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: 2}, connect.CodeNotFound, "no place")
}

// placeOf is the record of a job's place.
func placeOf(t *testing.T, etcd *clientv3.Client, job uint64) *mvccpb.KeyValue {
	res, err := etcd.Get(t.Context(), "", clientv3.WithPrefix())
	require.NoError(t, err)
	i := slices.IndexFunc(res.Kvs, func(kv *mvccpb.KeyValue) bool {
		return strings.Contains(string(kv.Key), "jobqueue/") && strings.HasSuffix(string(kv.Key), fmt.Sprintf("/%020d", job))
	})
	require.GreaterOrEqual(t, i, 0)
	return res.Kvs[i]
}

// A tenant has so many places, exactly; a call that is made again finds its own.
func TestPlacesOfATenantAreLimited(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	const few = 6 // calls side by side for the last place
	do(t, rpc.QueueJob, queueJob(1, 1))
	first := placeOf(t, etcd, 1)
	for job := 2; job < controller.MaxQueued; job++ {
		_, err := etcd.Put(t.Context(), strings.TrimSuffix(string(first.Key), fmt.Sprintf("%020d", 1))+fmt.Sprintf("%020d", job), string(first.Value))
		require.NoError(t, err)
	}
	var made atomic.Int64
	var all sync.WaitGroup
	for job := range uint64(few) {
		all.Go(func() {
			_, err := try(t, rpc.QueueJob, queueJob(5000+job, 1))
			switch {
			case err == nil:
				made.Add(1)
			case connect.CodeOf(err) != connect.CodeResourceExhausted:
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, made.Load())
	do(t, rpc.QueueJob, queueJob(1, 1))
	refused(t, rpc.QueueJob, queueJob(9000, 1), connect.CodeResourceExhausted, "1024 jobs")
}

// A place that was never admitted goes after a time, one that was stays.
func TestPlacesGetOld(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	clock := stopped(c)
	lead(t, c)
	do(t, rpc.QueueJob, queueJob(1, 1<<20))
	do(t, rpc.QueueJob, queueJob(2, 1<<20))
	require.True(t, do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: 1}).Admitted)
	clock.Add(int64(controller.QueueLasts))
	do(t, rpc.QueueJob, queueJob(3, 1<<20))
	places := func() (jobs []uint64) {
		for _, p := range do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{}).Jobs {
			jobs = append(jobs, p.Job)
		}
		return jobs
	}
	require.Eventually(t, func() bool { return len(places()) == 2 }, patience, 20*time.Millisecond)
	require.Equal(t, []uint64{1, 3}, places())
}

// The places of a tenant go with it.
func TestPlacesOfATenantGoWithIt(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	do(t, rpc.CreateTenant, &quarrypb.CreateTenantRequest{Name: "shop"})
	do(t, in(c, "shop").QueueJob, queueJob(1, 1<<20))
	do(t, rpc.QueueJob, queueJob(1, 1<<20))
	require.True(t, do(t, in(c, "shop").AdmitJob, &quarrypb.AdmitJobRequest{Job: 1}).Admitted)
	require.True(t, do(t, rpc.AdmitJob, &quarrypb.AdmitJobRequest{Job: 1}).Admitted)
	require.EqualValues(t, 2<<20, do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{}).UsedBytes)
	do(t, rpc.DeleteTenant, &quarrypb.DeleteTenantRequest{Name: "shop"})
	require.Eventually(t, func() bool { return do(t, rpc.ListJobQueue, &quarrypb.ListJobQueueRequest{}).UsedBytes == 1<<20 }, patience, 20*time.Millisecond)
}
