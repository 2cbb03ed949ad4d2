package job

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/metrics"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/proto"
)

// This file runs attempts of parts and records how they ended.

// work runs one attempt of a part and records how it ended. It returns an error only if the job's
// records are unsound. The attempt works on a copy of the part's record, because the beat changes
// the record.
func (w *worker) work(ctx context.Context, j *Job, p *Part) (err error) {
	defer survive(&err)
	began := time.Now()
	w.Tally.busy.Add(1)
	defer w.Tally.busy.Add(-1)
	pctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	dctx, stop := context.WithTimeoutCause(pctx, j.Spec.PartTimeout, errDeadline)
	defer stop()
	total := max(1, map[string]int{phaseMap: j.Maps, phaseReduce: j.Reduces}[p.Phase])
	e := newEnv(dctx, w, j, coproc.Part{Job: j.ID, Phase: coproc.Phase(p.Phase), Index: p.Index, Of: total, Attempt: p.Attempt})
	if p.second {
		e.part.Attempt++ // plugins name things by it
		return w.workBeside(dctx, cancel, j, p, e, began)
	}

	// The attempt works on a copy of the record; the beat owns p.
	result := make(chan attempt, 1)
	mine := *p
	go func() {
		a := attempt{Part: mine}
		a.Records, a.Emitted, a.Runs, a.Error = 0, 0, nil, ""
		a.err = w.attempt(dctx, j, &a.Part, e)
		w.ends(&a.Part)
		result <- a
	}()
	w.conclude(dctx, cancel, j, p, e, began, result)
	return nil
}

// conclude waits for the part's own attempt, and records how it ended.
func (w *worker) conclude(dctx context.Context, cancel context.CancelCauseFunc, j *Job, p *Part, e *env, began time.Time, result <-chan attempt) {
	a, ok := w.await(dctx, cancel, p.Job, func() error { return w.beat(p, e) }, result, false)
	if !ok {
		// The plugin does not stop: give the part up, then the process.
		w.record(j, p, attempt{err: context.Cause(dctx), runs: true}, e, began)
		w.Die(fmt.Sprintf("%v: %v, and it does not stop", p, context.Cause(dctx)))
		a = <-result // Die of a test returns
		dropRuns(w.tidy, w.c, a.Runs)
		return
	}
	if a.err != nil && context.Cause(dctx) != nil {
		a.err = context.Cause(dctx)
	}
	w.record(j, p, a, e, began)
	if errors.Is(a.err, errMemory) {
		w.Die(a.err.Error())
	}
}

// beat raises the beat of a part's own attempt. An error ends the attempt: another worker has the part, or is to have it.
// It gives way to no second attempt that stands still, which would not take the part: each attempt that follows would give way to it, too. Nor does
// it if one of the part has given way already: the second attempt has stood still since, and may do so again.
func (w *worker) beat(p *Part, e *env) error {
	p.Beat++
	e.tell(p)
	switch err := w.store.settlePart(w.tidy, w.session, p); {
	case errors.Is(err, errLost):
		return errLost
	case !p.Yielded && p.Second.ready() && w.seconded(p):
		return errYields
	}
	return nil
}

// attempt is how a part's attempt ended.
type attempt struct {
	Part
	err  error // nil: the part is done
	runs bool  // it has not ended, and may change memory
}

// dropRuns frees the objects of runs.
func dropRuns(ctx context.Context, c *client.Client, runs [][][]proto.Ref) {
	for _, bucket := range runs {
		for _, refs := range bucket {
			freeRefs(ctx, c, refs)
		}
	}
}

// await raises the beat of an attempt until that has returned. It cancels the attempt if the job
// has ended, the process takes too much memory, or raise fails. false: the
// attempt has not returned in time after its context ended, see mayStay.
func (w *worker) await(ctx context.Context, cancel context.CancelCauseFunc, id uint64, raise func() error, result <-chan attempt, second bool) (attempt, bool) {
	beat := time.NewTicker(w.Lease / 6)
	defer beat.Stop()
	var weigh <-chan time.Time
	if w.ProcessBytes > 0 {
		t := time.NewTicker(weighEvery)
		defer t.Stop()
		weigh = t.C
	}
	var over <-chan time.Time
	hurried := false
	hurry := func() {
		if !hurried {
			hurried, over = true, time.After(stopTime)
		}
	}
	ended, bound := ctx.Done(), w.bound.Done()
	for {
		select {
		case a := <-result:
			return a, true
		case <-over:
			return attempt{}, false
		case <-ended:
			if ended = nil; !hurried {
				over = time.After(mayStay(ctx, second))
			}
		case <-bound: // an attempt that stays holds up the worker's next session
			bound = nil
			hurry()
		case <-weigh:
			if heapBytes() > uint64(w.ProcessBytes) {
				cancel(fmt.Errorf("%w: %d MiB", errMemory, w.ProcessBytes>>20))
				hurry()
			}
		case <-beat.C:
			if j, err := w.store.Job(w.tidy, id); err == nil && j.State.Ended() {
				if cancel(errCancelled); !second {
					hurry()
				}
			} else if err := raise(); err != nil {
				cancel(err)
			}
		}
	}
}

// mayStay is how long a plugin has to return after its attempt's context has ended. The process ends then, with the other parts that it runs. It does not
// for the sake of a second attempt: where the part has another attempt that goes on, or is done, the plugin may stay until the deadline of its own.
func mayStay(ctx context.Context, second bool) time.Duration {
	cause := context.Cause(ctx)
	stays := errors.Is(cause, errYields) || second && (errors.Is(cause, errLost) || errors.Is(cause, errCancelled))
	if deadline, ok := ctx.Deadline(); ok && stays {
		return max(0, time.Until(deadline)) + stopTime
	}
	return stopTime
}

// weighEvery is how often a worker looks at its own memory while a part runs: a plugin
// can take some hundred MiB in that time.
const weighEvery = 20 * time.Millisecond

// heapBytes is the live heap of the process.
func heapBytes() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// record writes how an attempt ended into the part's record. If the record is another worker's by
// now, the result is dropped, and what the attempt made is freed. If it is unknown whether it was
// written, nothing is freed.
func (w *worker) record(j *Job, p *Part, a attempt, e *env, began time.Time) {
	ctx, cancel := context.WithTimeout(w.tidy, w.Lease)
	defer cancel()
	e.tell(p)
	p.Took = time.Since(began)
	if !a.runs {
		p.Session = client.Session{}
	}
	outcome := outcomeDone
	switch {
	case a.err == nil:
		p.State, p.Error, p.Records, p.Emitted, p.Runs, p.Plan = Done, "", a.Records, a.Emitted, a.Runs, a.Plan
	case errors.Is(a.err, errLost), errors.Is(a.err, client.ErrFenced) && context.Cause(w.bound) != nil:
		outcome = outcomeLost
	case errors.Is(a.err, errCancelled):
		p.State, outcome = Cancelled, outcomeCancelled
	case errors.Is(a.err, errYields):
		p.State, p.Yielded, outcome = Pending, true, outcomeYielded
	case errors.Is(a.err, errInQueue):
		p.State, p.Attempt, p.Error, p.queued, outcome = Pending, p.Attempt-1, cut(a.err.Error(), maxErrorLen), true, outcomeQueued
	default:
		outcome = outcomeFailed
		w.trees.forget(p.Job) // one may have been dropped
		p.State, p.Error = Pending, cut(a.err.Error(), maxErrorLen)
		p.log(fmt.Sprintf("attempt %d on %s: %s", p.Attempt, w.Name, p.Error))
		if p.spent() >= MaxAttempts || errors.Is(a.err, errBudget) {
			p.State = Failed
		}
	}
	err := errLost
	if outcome != outcomeLost {
		err = w.store.settlePart(ctx, w.session, p)
	}
	if errors.Is(err, errLost) {
		outcome = outcomeLost
	}
	if outcome != outcomeQueued {
		w.Tally.attempt(p.Phase, outcome, p.Took)
	}
	w.Tally.emitted.Add(a.Emitted)
	unknown := errors.Is(err, client.ErrUnknown)
	if a.err != nil || err != nil && !unknown {
		e.giveUp(ctx)
	}
	switch {
	case unknown:
		// Nothing is freed: if it is recorded as done, the output names what the attempt has made. If not, the
		// part's beat stands still, and it is taken again.
		w.Logger.Warn("part's end may not be recorded", "part", p.String(), "error", err)
	case err != nil:
		dropRuns(ctx, w.c, a.Runs)
	case p.State == Failed:
		err = w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
	}
	if err != nil {
		w.Logger.Warn("part is lost", "part", p.String(), "error", err)
	}
}

// attempt runs the part in its phase.
func (w *worker) attempt(ctx context.Context, j *Job, p *Part, e *env) (err error) {
	defer survive(&err)
	switch p.Phase {
	case phasePlan:
		return w.makePlan(ctx, j, p)
	case phaseReplace:
		return w.commit(ctx, j)
	}
	if err := w.allows(&j.Spec); err != nil {
		return err
	}
	prog, release, err := w.program(ctx, &j.Spec)
	if err != nil {
		return err
	}
	defer release()
	if p.Phase == phaseReduce {
		return w.runReduce(ctx, prog, j, p, e)
	}
	return w.runMap(ctx, prog, j, p, e)
}

// makePlan makes the output and cuts the input into map parts. The parts count when the plan part
// is recorded as done.
func (w *worker) makePlan(ctx context.Context, j *Job, p *Part) error {
	for _, name := range append([]string{j.Spec.Output}, j.Spec.Writes...) {
		if err := w.mayWrite(name); err != nil {
			return err
		}
	}
	var err error
	if j.Spec.Replace {
		err = w.stage(ctx, j)
	} else {
		_, err = kv.OpenOrCreate(ctx, w.c, j.Spec.Output, btree.Config{})
	}
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	parts, err := plan(ctx, w.c, j)
	if err != nil {
		return err
	}
	// The plan counts once it is recorded: that of an attempt that has lost its part does not.
	p.Plan = parts
	return nil
}

// allows refuses a job that asks for more than the worker gives.
func (w *worker) allows(s *Spec) error {
	switch {
	case s.MemoryBytes > w.ModuleBytes:
		return fmt.Errorf("the job asks for %d MiB of memory for an instance, worker %s gives %d MiB: lower --memory, or raise the worker's --module", s.MemoryBytes>>20, w.Name, w.ModuleBytes>>20)
	case s.CompileTimeout > w.CompileTimeout:
		return fmt.Errorf("the job asks for %v to compile its module, worker %s gives %v: lower --compile-timeout, or raise the worker's", s.CompileTimeout, w.Name, w.CompileTimeout)
	case s.PartTimeout > w.PartTimeout:
		return fmt.Errorf("the job asks for %v for a part, worker %s gives %v: lower --part-timeout, or raise the worker's", s.PartTimeout, w.Name, w.PartTimeout)
	}
	return nil
}

// program finds a plugin: compiled in, or uploaded. release ends the use of it.
func (w *worker) program(ctx context.Context, s *Spec) (p program, release func(), err error) {
	name := s.Plugin
	if about, make, ok := coproc.Lookup(name); ok {
		return compiled{about, make}, func() {}, nil
	}
	if s.Module == "" { // else any program of the tenant could upload what runs with the submitter's rights
		return nil, nil, fmt.Errorf("%w: %q is not compiled into worker %s, and the job was submitted without a module: submit it again", ErrNoPlugin, name, w.Name)
	}
	m, err := w.store.module(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	if m.SHA256 != s.Module {
		return nil, nil, fmt.Errorf("module %s was replaced after the job was submitted: submit it again", name)
	}
	return w.compiled(ctx, m, cmp.Or(s.CompileTimeout, w.CompileTimeout))
}

// compiled is the machine code of a module, which is made at its first use.
func (w *worker) compiled(ctx context.Context, m Module, limit time.Duration) (p program, release func(), err error) {
	end, err := w.mayCompile(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer end()
	if have, release := w.modules.take(m.SHA256); have != nil {
		return have, release, nil
	}
	b, err := w.store.wasm(ctx, m)
	if err != nil {
		return nil, nil, err
	}
	code, err := w.rt.compile(ctx, b, limit)
	if err != nil {
		return nil, nil, fmt.Errorf("module %s: %w", m.About.Name, err)
	}
	have := &module{About: m.About, rt: w.rt, code: code}
	return have, w.modules.put(m.SHA256, have), nil
}

// mayCompile waits until no other module is compiled. A part waits no longer than its own time.
func (w *worker) mayCompile(ctx context.Context) (end func(), err error) {
	select {
	case w.compiling <- struct{}{}:
		return func() { <-w.compiling }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
