package job

import (
	"context"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/client"
)

// This file has the place of a job in the controllers' queue for the quota of records between map and reduce: its
// submitter makes it, workers ask whether the job may begin, and the worker that has freed those records gives it up.

// askEvery is how often a worker asks for a job that waits.
const askEvery = 200 * time.Millisecond

// place draws a number for a new job and, where the job reduces, gives it a place in the queue. A number that has a place already is
// that of a job whose records were lost, with the tree: it is passed over.
func (s *Store) place(ctx context.Context, j *Job) (err error) {
	if j.Reduces > 0 && j.Spec.ShuffleBytes == 0 {
		q, err := s.c.Jobs().Quota(ctx)
		if err != nil {
			return fmt.Errorf("job: quota of records between map and reduce: %w", err)
		}
		j.Spec.ShuffleBytes = int64(min(q.Bytes, DefaultShuffleBytes, max(MinShuffleBytes, q.Bytes/4)))
	}
	for {
		if j.ID, err = s.number(ctx); err != nil || j.Reduces == 0 {
			return err
		}
		err = s.c.Jobs().Queue(ctx, j.ID, j.digest(), j.Spec.shuffleBytes())
		if connect.CodeOf(err) == connect.CodeAlreadyExists {
			continue
		}
		if j.Queued = err == nil; err != nil {
			return fmt.Errorf("job: %w", err)
		}
		return nil
	}
}

// leave gives up the place of a job that was not submitted. An error is ignored: no worker asks for a job without a
// record, so it does not hold up other jobs.
func (s *Store) leave(ctx context.Context, j *Job) {
	if j.Queued {
		_ = s.c.Jobs().Leave(ctx, j.ID)
	}
}

// lost gives up the place of a job whose records are gone, with the memory of the jobs' tree; false: there is no such place.
func (s *Store) lost(ctx context.Context, id uint64) bool {
	q, err := s.c.Jobs().Quota(ctx)
	return err == nil && slices.ContainsFunc(q.Jobs, func(p client.Place) bool { return p.Job == id }) && s.c.Jobs().Leave(ctx, id) == nil
}

// Quota is what jobs of the cluster may have between map and reduce, and the jobs of this tenant that have it, or wait for it.
func (s *Store) Quota(ctx context.Context) (client.Quota, error) { return s.c.Jobs().Quota(ctx) }

// Waiting says what a job waits for in the queue; "" if it waits for nothing there.
func (j *Job) Waiting(q client.Quota) string {
	i := slices.IndexFunc(q.Jobs, func(p client.Place) bool { return p.Job == j.ID && !p.Admitted })
	if i < 0 || j.State.Ended() {
		return ""
	}
	text := fmt.Sprintf("job waits: needs %s of shuffle, %s free of %s", size(q.Jobs[i].Bytes), size(q.Free()), size(q.Bytes))
	switch {
	case q.Jobs[i].Bytes > q.Bytes:
		text += ": cancel it and submit it with a smaller --shuffle, or raise the quota with quarry job quota"
	case q.Jobs[i].Bytes <= q.Free():
		text += ": enough is free: the next worker that asks begins it, after earlier waiting jobs"
	}
	return text
}

// size writes bytes with four digits.
func size(n uint64) string {
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if one := uint64(1) << (30 - 10*i); n >= one {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(one), unit)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// mayBegin says whether a job may have records between map and reduce, before it is planned. The worker asks only for jobs that it can run,
// so a job that no worker can run is never admitted.
func (w *worker) mayBegin(ctx context.Context, j *Job) (bool, error) {
	if !j.Queued || j.Phase != phasePlan {
		return true, nil
	}
	if !j.runsOn(&w.me) {
		return false, nil
	}
	w.mu.Lock()
	wait := time.Since(w.asked[j.ID]) < askEvery
	w.mu.Unlock()
	if wait {
		return false, nil
	}
	admitted, err := w.c.Jobs().Admit(ctx, j.ID)
	if connect.CodeOf(err) == connect.CodeNotFound { // it has ended since, or another program has given it up
		return false, w.store.end(ctx, j.ID, Failed, "its place in the queue for records between map and reduce is gone: submit it again")
	}
	if err == nil && !admitted {
		w.mu.Lock()
		if len(w.asked) >= maxReady {
			clear(w.asked)
		}
		w.asked[j.ID] = time.Now()
		w.mu.Unlock()
	}
	return admitted, err
}
