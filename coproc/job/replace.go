package job

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// Times for which readers that have the former output open can go on reading it.
const (
	DefaultLinger = 30 * time.Second
	MaxLinger     = 24 * time.Hour
)

// owner is whom a job's staged output belongs to.
func owner(id uint64) string { return fmt.Sprintf("job %d", id) }

// errInQueue: the part has to wait for another job's clean-up. It is handed back, and the attempt does not count.
var errInQueue = errors.New("waits")

// stage makes the tree that the job's parts write. Another job that replaces the same output comes first, unless
// it has ended without settling, as one does whose records were damaged. Behind one that has ended, and is still to be
// cleaned up, the part goes back into the queue (errInQueue): this worker may be the one that has to clean up.
func (w *worker) stage(ctx context.Context, j *Job) error {
	for {
		_, err := kv.Stage(ctx, w.c, j.Spec.Output, owner(j.ID))
		other := (*kv.ReplacingError)(nil)
		if !errors.As(err, &other) {
			return err
		}
		var id uint64
		if _, serr := fmt.Sscanf(other.Owner, "job %d", &id); serr != nil || other.Owner != owner(id) || id == j.ID {
			return err
		}
		switch _, gerr := w.store.t.Get(ctx, activeKey(id), nil); {
		case gerr == nil && w.settles(ctx, id) && w.still(fmt.Sprint("settles/", id), 0) < j.Spec.PartTimeout:
			return fmt.Errorf("%w: %w: it has ended, and is still to be cleaned up", errInQueue, err)
		case gerr == nil:
			return fmt.Errorf("%w: submit the job when that one has ended", err)
		case !errors.Is(gerr, btree.ErrNoKey):
			return gerr
		}
		if err := kv.Settle(ctx, w.c, j.Spec.Output, other.Owner); err != nil {
			return err
		}
	}
}

// settles says whether a job has ended, so that its clean-up gives up what it has staged.
func (w *worker) settles(ctx context.Context, id uint64) bool {
	other, err := w.store.read(ctx, id)
	return err == nil && other.State.Ended()
}

// commit makes the output's name stand for what the parts have written.
func (w *worker) commit(ctx context.Context, j *Job) error {
	if err := w.mayWrite(j.Spec.Output); err != nil {
		return err
	}
	return kv.Commit(ctx, w.c, j.Spec.Output, owner(j.ID))
}

// settle frees the former output of an ended job once it has lingered, or what the job has staged in vain, which no
// reader has open; false: it lingers. What the name stands for is never freed, whatever became of the commit.
func (w *worker) settle(ctx context.Context, j *Job) (bool, error) {
	if !j.Spec.Replace {
		return true, nil
	}
	if !j.Freed && j.Phase == phaseReplace { // a job that failed in that phase may have committed or not
		committed, err := kv.Committed(ctx, w.c, j.Spec.Output, owner(j.ID))
		if err != nil {
			return false, err
		}
		if j.Freed = committed; committed {
			return false, ignoreConflict(w.store.swapJob(ctx, j))
		}
	}
	if j.Freed && !w.lingered(j) {
		return false, nil
	}
	if err := w.mayWrite(j.Spec.Output); err != nil {
		w.Logger.Warn("what a job has staged is left", "job", j.ID, "error", err) // its submitter's grants have changed
		return true, nil
	}
	return true, kv.Settle(ctx, w.c, j.Spec.Output, owner(j.ID))
}

// ignoreConflict: another worker has changed the record, which is read again.
func ignoreConflict(err error) error {
	if errors.Is(err, btree.ErrConflict) {
		return nil
	}
	return err
}

// lingered says whether this worker has seen the job ended for as long as the former output lingers. It goes by
// its own clock, not by the one of the worker that has ended the job.
func (w *worker) lingered(j *Job) bool {
	linger := j.Spec.Linger
	if linger == 0 {
		linger = DefaultLinger
	}
	return w.still(fmt.Sprint("linger/", j.ID), 0) >= linger
}
