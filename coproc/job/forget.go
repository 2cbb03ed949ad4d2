package job

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// Times for which the records of a job that has ended are kept.
const (
	DefaultKeep = 30 * 24 * time.Hour
	MaxKeep     = 10 * 365 * 24 * time.Hour
)

// ErrNotEnded: a job goes on, or a worker has still to free its intermediate results.
var ErrNotEnded = errors.New("job has not ended")

// Forget removes the records of a job that has ended: its parts, errors and log. What the job has written stays.
func (s *Store) Forget(ctx context.Context, id uint64) error {
	j, err := s.read(ctx, id)
	if errors.Is(err, ErrNoJob) && s.lost(ctx, id) {
		return nil
	}
	if err != nil {
		return err
	}
	if !j.State.Ended() {
		return fmt.Errorf("job %d is %s: %w: quarry job cancel %d ends it", id, j.State, ErrNotEnded, id)
	}
	switch _, err := s.t.Get(ctx, activeKey(id), nil); {
	case err == nil:
		if done, err := s.sweep(ctx, j); err != nil {
			return fmt.Errorf("job %d is %s: freeing its intermediate results: %w", id, j.State, err)
		} else if !done {
			return fmt.Errorf("job %d is %s: %w: a worker has still to free its intermediate results, or the output that it has replaced: try again", id, j.State, ErrNotEnded)
		}
	case !errors.Is(err, btree.ErrNoKey):
		return err
	}
	if err := s.dropParts(ctx, id); err != nil {
		return err
	}
	// The job's own record goes last: a Forget that was cut short can be repeated.
	if err := s.t.Delete(ctx, jobKey(id)); err != nil && !errors.Is(err, btree.ErrNoKey) {
		return err
	}
	return nil
}

// sweep cleans up after an ended job for which workers have acted for its submitter, as such a worker does: there may be none any more, when the
// delegation was revoked or has expired. false: there is something left to do, or it is left to workers with rights of their own.
func (s *Store) sweep(ctx context.Context, j *Job) (done bool, err error) {
	if !j.Delegated || s.d != nil {
		return false, nil
	}
	// Whether an attempt may still change memory is for the fence of its session to say, and not for its beat.
	w := &worker{Config: Config{Lease: -1, Tally: &Tally{}, Logger: slog.Default()}, c: s.c, store: s, seen: map[string]sighting{}, here: map[string]running{}, trees: newTrees(s.c, s.t)}
	if err := w.cleanUp(ctx, j); err != nil {
		return false, err
	}
	if _, err = s.t.Get(ctx, activeKey(j.ID), nil); errors.Is(err, btree.ErrNoKey) {
		return true, nil
	}
	return false, err
}

// dropParts removes the records of a job's parts.
func (s *Store) dropParts(ctx context.Context, id uint64) error {
	var keys [][]byte
	for _, prefix := range []string{fmt.Sprintf("part/%012d/", id), inputs(id)} {
		err := s.t.Scan(ctx, prefixed(prefix), func(key, _ []byte, _ uint64) bool {
			keys = append(keys, append([]byte(nil), key...))
			return true
		})
		if err != nil {
			return err
		}
	}
	for _, key := range keys {
		if err := s.t.Delete(ctx, key); err != nil && !errors.Is(err, btree.ErrNoKey) {
			return err
		}
	}
	return nil
}

// A submission forgets some of the jobs whose time is over, so that records do not pile up. There is no other
// program that could: workers have rights only while a job goes on.
const (
	expiredRead = 1000 // jobs that are read for it, oldest first
	expiredMost = 100  // jobs that are forgotten
)

// forgetExpired forgets jobs that have ended, and were to be kept until now.
func (s *Store) forgetExpired(ctx context.Context, now time.Time) {
	r := prefixed("job/")
	r.Limit = expiredRead
	all, err := list[Job](ctx, s.t, r, nil)
	forgotten := 0
	for _, j := range all {
		if err != nil || forgotten == expiredMost {
			return
		}
		if j.expired(now) && s.Forget(ctx, j.ID) == nil {
			forgotten++
		}
	}
}

// expired says whether the records of a job have been kept long enough.
func (j *Job) expired(now time.Time) bool {
	keep := j.Spec.Keep
	if keep == 0 {
		keep = DefaultKeep
	}
	return j.State.Ended() && !j.Ended.IsZero() && now.Sub(j.Ended) > keep
}
