package job

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// This file claims parts for a worker and moves jobs to their next phase.

// claim claims a part of some job, and advances jobs whose parts are all done. nil: there is
// nothing to do. The worker's turns say in which order it looks at the jobs.
func (w *worker) claim(ctx context.Context) (*Job, *Part, error) {
	jobs, err := w.store.active(ctx)
	if err != nil {
		return nil, nil, err
	}
	if w.store.d != nil && len(jobs) > 0 {
		w.class.Store(int64(jobs[0].class))
	}
	w.mu.Lock()
	jobs = w.turns.order(jobs)
	w.mu.Unlock()
	var listed []active
	var slow []straggler
	for _, a := range jobs {
		if w.full(a.id) {
			continue
		}
		j, p, fresh, err := w.claimReady(ctx, a.id)
		if err == nil && p == nil && !fresh {
			j, p, err = w.look(ctx, a.id, &slow)
		}
		if err != nil || p != nil {
			w.took(a, p != nil, jobs)
			return j, p, err
		}
		if fresh {
			listed = append(listed, a)
		}
	}
	for _, a := range listed { // nothing else is to be done
		if j, p, err := w.look(ctx, a.id, &slow); err != nil || p != nil {
			w.took(a, p != nil, jobs)
			return j, p, err
		}
	}
	return w.beginSecond(ctx, slow)
}

// took records whose turn it was.
func (w *worker) took(a active, begun bool, jobs []active) {
	w.mu.Lock()
	w.turns.took(a, begun, jobs)
	w.mu.Unlock()
	if begun {
		w.desk.begun(w.tenant(), a.class)
	}
}

// tenant is whose job the worker acts for; "" if it acts for itself.
func (w *worker) tenant() string {
	if w.store.d == nil {
		return ""
	}
	return w.store.d.Tenant
}

// look is claimOf, and refuses a job whose records are damaged or forged.
func (w *worker) look(ctx context.Context, id uint64, slow *[]straggler) (*Job, *Part, error) {
	j, p, err := w.claimOf(ctx, id, slow)
	if unsound(err) {
		w.refuse(ctx, id, err)
		return nil, nil, nil
	}
	if err == nil && p == nil {
		w.list(id, nil)
	}
	return j, p, err
}

// claimOf claims a part of one job, and advances the job if its parts are all done. It adds the parts to slow that may
// have a second attempt.
func (w *worker) claimOf(ctx context.Context, id uint64, slow *[]straggler) (j *Job, p *Part, err error) {
	defer survive(&err)
	if j, err = w.job(ctx, id); errors.Is(err, ErrNoJob) {
		return nil, nil, fmt.Errorf("%w: %w", errDamaged, err) // the marker is written after the job
	} else if err != nil {
		return nil, nil, err
	}
	for !j.State.Ended() {
		parts, err := w.store.Parts(ctx, id, j.Phase)
		if err != nil {
			return nil, nil, err
		}
		can := w.can(j)
		if can {
			if can, err = w.mayBegin(ctx, j); err != nil {
				return nil, nil, err
			}
		}
		p, done, err := w.choose(ctx, j, parts, can)
		if err != nil || p != nil {
			return j, p, err
		}
		if !done {
			if can {
				*slow = append(*slow, w.stragglers(j, parts)...)
			}
			return nil, nil, nil
		}
		if j, err = w.advance(ctx, j, parts); err != nil {
			return nil, nil, err
		}
	}
	return nil, nil, w.cleanUp(ctx, j)
}

// job reads the record of a job that the worker is to act on.
func (w *worker) job(ctx context.Context, id uint64) (*Job, error) {
	j, err := w.store.Job(ctx, id)
	if err == nil {
		err = j.check(id)
	}
	return j, err
}

// unsound says whether an error is about the records of a job. Then the job is refused, and the
// worker goes on with others.
func unsound(err error) bool { return errors.Is(err, errForged) || errors.Is(err, errDamaged) }

// survive turns a panic over the records of a job into an error that refuses the job: other programs of its
// tenant can write them, and the worker works for other tenants too.
func survive(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("%w: panic: %v\n%s", errDamaged, r, cut(string(debug.Stack()), maxErrorLen/2))
	}
}

// readyFor is how long a listing of unclaimed parts is used. A part that another worker has
// claimed since costs one failed compare-and-swap.
const readyFor = time.Second

// listing are the parts of a job that were unclaimed when its parts were listed last, and are
// still to be tried.
type listing struct {
	parts []*Part
	at    time.Time // when they were listed
}

// list keeps the parts of a job that are still to be tried.
func (w *worker) list(id uint64, parts []*Part) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ready) >= maxReady {
		clear(w.ready)
	}
	w.ready[id] = listing{parts, time.Now()}
}

// maxReady bounds the jobs with a listing.
const maxReady = 1024

// relist forgets an empty listing, because parts may have become claimable since.
func (w *worker) relist(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ready[id].parts) == 0 {
		delete(w.ready, id)
	}
}

// claimReady claims a part of a job from its listing. To list all parts for each claim would take
// a time that grows with the square of their number. fresh: the listing is new enough, so that
// the caller need not list again.
func (w *worker) claimReady(ctx context.Context, id uint64) (j *Job, p *Part, fresh bool, err error) {
	for {
		w.mu.Lock()
		l, ok := w.ready[id]
		if fresh = ok && time.Since(l.at) <= readyFor; !fresh {
			delete(w.ready, id)
		} else if n := len(l.parts); n > 0 {
			p, l.parts = l.parts[n-1], l.parts[:n-1]
			w.ready[id] = l
		}
		w.mu.Unlock()
		if p == nil {
			return nil, nil, fresh, nil
		}
		if j, err = w.job(ctx, id); unsound(err) {
			return nil, nil, false, nil // claimOf refuses it
		} else if err != nil {
			return nil, nil, fresh, err
		}
		if ok := !j.State.Ended() && j.Phase == p.Phase && j.Phase != phasePlan && w.can(j); ok {
			if ok, err = w.take(ctx, p); err != nil {
				return nil, nil, fresh, err
			} else if ok {
				return j, p, fresh, nil
			}
		}
		p = nil
	}
}

// take claims a part, by a compare-and-swap of its record. false: another worker has it, or may
// still change memory for it; or this claim has failed the job, because the part's workers died
// MaxAttempts times.
// Linearizes at: the swap of the part's record.
func (w *worker) take(ctx context.Context, p *Part) (bool, error) {
	if !w.halted(ctx, p) || !w.begins(p) {
		return false, nil
	}
	silent, spent := p.State == Running, p.spent()
	p.State, p.Worker, p.Life, p.Session, p.Attempt, p.Beat = Running, w.Name, w.Life, w.session, min(p.Attempt, MaxAttempts)+1, p.Beat+1
	if spent >= MaxAttempts {
		// Its worker died in each attempt: the part ends its workers.
		p.State, p.Error = Failed, fmt.Sprintf("its workers died %d times", MaxAttempts)
	}
	err := w.store.swapPart(ctx, p)
	if err != nil || p.State == Failed {
		w.ends(p) // if it is unknown whether the claim was recorded, this worker may take the part after a lease
	}
	switch {
	case errors.Is(err, errLost):
		return false, nil
	case err != nil:
		return false, err
	case p.State == Failed:
		return false, w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
	}
	at := placeElsewhere
	switch p.Node {
	case 0:
		at = placeAnywhere
	case w.node:
		at = placeNear
	}
	w.Tally.places[at].Add(1)
	if p.Attempt > 1 {
		w.Tally.retries.Add(1)
	}
	if silent {
		w.Tally.takeovers.Add(1)
	}
	return true, nil
}

// halted says whether no attempt of a part can change memory any more: its session is fenced, or
// it has returned. Each attempt and each clean-up begins with a compare-and-swap of the record
// for which halted was true, so that nothing of an earlier attempt comes after it. If no
// controller answers it is false: the part is looked at again later.
func (w *worker) halted(ctx context.Context, p *Part) bool { return w.stopped(ctx, p, p.Session) }

// stopped says whether an attempt of a part, or its second attempt, can change memory no more, by its session.
func (w *worker) stopped(ctx context.Context, p *Part, session client.Session) bool {
	switch session {
	case client.Session{}:
		return true // the attempt had ended when this was recorded
	case w.session:
		return !w.runs(p)
	}
	fenced, err := w.c.Fenced(ctx, session)
	if err != nil && ctx.Err() == nil {
		w.Logger.Warn("part waits", "part", p.String(), "error", err)
	}
	return fenced
}

// full says whether as many parts of a job run here as may.
func (w *worker) full(id uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fullHere(id)
}

// fullHere is full, under the worker's lock.
func (w *worker) fullHere(id uint64) bool {
	if w.MaxOfJob == 0 {
		return false
	}
	n := 0
	for _, r := range w.here {
		if r.job == id {
			n++
		}
	}
	return n >= w.MaxOfJob
}

// begins records that an attempt of this worker may change memory from now on; false: one may
// already, or as many parts of the job run here as may.
func (w *worker) begins(p *Part) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, runs := w.here[p.String()]; runs || w.fullHere(p.Job) {
		return false
	}
	r := running{job: p.Job}
	if w.MaxOfJob > 0 && w.Places != nil {
		if r.release = w.Places.Take(w.c.Tenant(), p.Job, w.MaxOfJob); r.release == nil {
			return false
		}
	}
	w.here[p.String()] = r
	return true
}

// ends records that the attempt has returned.
func (w *worker) ends(p *Part) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.here[p.String()]; r.release != nil {
		r.release()
	}
	delete(w.here, p.String())
}

// runs says whether an attempt of this worker has not returned.
func (w *worker) runs(p *Part) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, runs := w.here[p.String()]
	return runs
}

// rank orders the parts for this worker: 0 not claimable, 1 claimable, 2 preferred.
func (w *worker) rank(p *Part, staff *staff) int {
	if w.seconded(p) && !w.stranded(p) {
		return 0
	}
	switch still := w.still(string(partKey(p.Job, p.Phase, p.Index)), p.Beat<<8|uint64(p.Attempt)); {
	case p.State == Running && still > w.Lease:
		return 2 // its worker is gone
	case p.State != Pending:
		return 0
	case p.Attempt > 0 && p.Worker == w.Name && still < elsewhere && staff.workers > 1:
		return 0 // it failed here: another worker is to try it
	case p.Node == w.node || p.Node == 0:
		return 2
	case staff.beside[p.Node] && still < w.Patience:
		return 0 // the worker on the part's node takes it when it has time
	}
	return 1
}

// can says whether the worker can run the present phase of a job. Planning and replacing need
// nothing; map and reduce need the plugin, compiled in, or as the module that was submitted. A
// job waits for a worker that can.
func (w *worker) can(j *Job) bool {
	return j.Phase == phasePlan || j.Phase == phaseReplace || j.runsOn(&w.me)
}

// choose claims one of the parts of a phase, if the worker can run it. done: all parts of the
// phase are done.
//
// Invariant: a part is claimed while fewer than j.Spec.MaxRunning parts before it are not done. Parts that are done stay so: of any that run at once,
// all but the last one were not done when that was claimed, and so they are fewer than MaxRunning. A list of parts that is out of date shows fewer of them as done.
func (w *worker) choose(ctx context.Context, j *Job, parts []*Part, can bool) (claimed *Part, done bool, err error) {
	left := 0
	var best []*Part
	rank := 0
	staff := w.staff.Load()
	for _, p := range parts {
		switch p.State {
		case Done:
			continue
		case Failed: // the worker that saw it ended before it failed the job
			return nil, false, w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
		}
		left++
		if why := w.bequeathed(p); why != "" {
			if err := w.disown(ctx, p, why); err != nil {
				return nil, false, err
			}
		}
		if !can || j.Spec.MaxRunning > 0 && left > j.Spec.MaxRunning {
			continue
		}
		r := w.rank(p, staff)
		if r > rank {
			best, rank = best[:0], r
		}
		if r > 0 && r == rank {
			best = append(best, p)
		}
	}
	rand.Shuffle(len(best), func(i, j int) { best[i], best[j] = best[j], best[i] })
	for i, p := range best {
		ok, err := w.take(ctx, p)
		if err != nil || p.State == Failed {
			return nil, false, err
		}
		if ok {
			w.list(p.Job, best[i+1:])
			return p, false, nil
		}
	}
	return nil, left == 0, nil
}

// advance moves a job to its next phase: it makes the parts of that phase, then swaps the job's
// record. Any number of workers may try; one swap succeeds.
func (w *worker) advance(ctx context.Context, j *Job, parts []*Part) (*Job, error) {
	var next []*Part
	switch j.Phase {
	case phasePlan:
		var err error
		if next, err = planned(j.ID, parts); err != nil {
			return nil, err
		}
		if err = w.setApart(ctx, next); err != nil {
			return nil, err
		}
		j.Maps, j.Phase = len(next), phaseMap
	case phaseMap:
		for i := range j.Reduces {
			next = append(next, &Part{Job: j.ID, Phase: phaseReduce, Index: i, State: Pending})
		}
		j.Phase = phaseReduce
	}
	if len(next) == 0 && j.Spec.Replace && j.Phase != phaseReplace {
		next, j.Phase = []*Part{{Job: j.ID, Phase: phaseReplace, State: Pending}}, phaseReplace
	}
	if err := w.store.makeParts(ctx, next); err != nil {
		return nil, err
	}
	if len(next) == 0 {
		j.State, j.Ended = Done, time.Now().UTC()
	}
	err := w.store.swapJob(ctx, j)
	if !errors.Is(err, btree.ErrConflict) && !errors.Is(err, btree.ErrNoKey) {
		return j, err
	}
	now, err := w.job(ctx, j.ID)
	if errors.Is(err, ErrNoJob) && len(next) > 0 { // this worker was stopped until others had ended the job, and it was forgotten
		return nil, errors.Join(err, w.store.dropParts(ctx, j.ID))
	}
	return now, err
}

// cleanUp ends what an ended job has left: it frees the runs between its phases when no attempt
// can write them any more, then the output that the job has replaced, and takes the job off the
// active ones.
func (w *worker) cleanUp(ctx context.Context, j *Job) error {
	if !j.Freed {
		if freed, err := w.dropAll(ctx, j); err != nil || !freed {
			return err
		}
		// Before the job is marked as freed, or retired: of a worker that dies in between another one repeats it.
		if j.Queued {
			if err := w.c.Jobs().Leave(ctx, j.ID); err != nil {
				return err
			}
		}
	}
	if settled, err := w.settle(ctx, j); err != nil || !settled {
		return err
	}
	return w.retire(ctx, j.ID, j.State, j.Delegated)
}

// dropAll frees the runs of an ended job; false: an attempt may still be writing some.
func (w *worker) dropAll(ctx context.Context, j *Job) (bool, error) {
	parts, err := w.store.Parts(ctx, j.ID, "")
	if err != nil {
		return false, err
	}
	for _, p := range parts {
		if p.State == Running && w.still(string(partKey(p.Job, p.Phase, p.Index)), p.Beat<<8|uint64(p.Attempt)) <= w.Lease {
			return false, nil // it will see that the job has ended
		}
		if w.seconded(p) || p.Second != nil && !w.stopped(ctx, p, p.Second.Session) {
			return false, nil // it frees its runs itself, or may still write some
		}
		if !w.halted(ctx, p) {
			return false, nil
		}
	}
	for _, p := range parts {
		dropRuns(ctx, w.c, p.Runs)
		if p.State.Ended() && p.Runs == nil {
			continue
		}
		if p.Runs, p.Session = nil, (client.Session{}); !p.State.Ended() {
			p.State = Cancelled
		}
		if err := w.store.swapPart(ctx, p); errors.Is(err, errLost) {
			return false, nil // another worker does it, or the part was alive; look again
		} else if err != nil {
			return false, err
		}
	}
	return true, w.dropManifests(ctx, j.ID)
}

// retire removes an ended job from the list of active ones.
func (w *worker) retire(ctx context.Context, id uint64, state State, delegated bool) error {
	w.trees.forget(id)
	switch err := w.store.t.Delete(ctx, activeKey(id)); {
	case err == nil: // only one worker's Delete succeeds: that one counts
		if w.store.d == nil && delegated { // workers that act for submitters end it in over
			_ = w.c.Jobs().End(ctx, id, false) // else it ends with its time
		}
		w.Tally.ended[place(endings[:], state)].Add(1)
	case !errors.Is(err, btree.ErrNoKey):
		return err
	}
	return nil
}
