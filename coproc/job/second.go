package job

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

// This file has second attempts of parts that take long. A second attempt runs beside the part's own one and changes
// nothing that others see: what it emits stays in the worker's memory, or in runs that no record names. Once it has a
// result, the part's own attempt gives way, or is fenced if it is silent. Then the second attempt takes the part, as any
// worker takes one whose attempt has ended, and puts what it has. So one attempt of a part changes memory at a time.

// Second is the second attempt of a part.
type Second struct {
	Worker string `json:"worker"` // name of the one that runs it, or ran it
	// Session under which it makes objects; zero once it has ended or taken the part. Nothing of the job is freed before this
	// session is fenced.
	Session client.Session `json:"session,omitzero"`
	Beat    uint64         `json:"beat,omitempty"`  // raised while it runs; of one that stands still for a lease nothing is expected any more
	Ready   bool           `json:"ready,omitempty"` // it has a result: the part's own attempt is to give way
}

// Runs says whether the second attempt has neither ended nor taken the part, as far as its worker has recorded it.
func (s *Second) Runs() bool { return s != nil && s.Session != client.Session{} }

// ready says whether the part's own attempt is to give way.
func (s *Second) ready() bool { return s.Runs() && s.Ready }

const (
	// slowBy is how many times the median of the parts that are done a part has to take to get a second attempt.
	slowBy = 2
	// heldBytes of output are kept by a second attempt of a part that writes the output. A part that has more gets none.
	heldBytes = 64 << 20
)

var (
	// errYields: the part's second attempt has a result.
	errYields = errors.New("the part's second attempt was faster")
	errHeld   = errors.New("the part cannot have a second attempt")
)

// held is what a second attempt has emitted into the output, until it has taken the part.
type held struct {
	data []byte   // records as coproc.AppendRecord writes them
	runs *written // the runs of a map part of a job that reduces; else nil
	err  error    // why there is no result, whatever the plugin makes of the answer
}

// add takes a record.
func (h *held) add(key, value []byte) error {
	if h.data = coproc.AppendRecord(h.data, key, value); len(h.data) > heldBytes {
		h.data = nil
		return h.refuse("it has more output than is kept for one")
	}
	return h.err
}

// refuse makes the second attempt fail.
func (h *held) refuse(why string) error {
	if h.err == nil {
		h.err = fmt.Errorf("%w: %s", errHeld, why)
	}
	return h.err
}

// put puts the records into the output.
func (h *held) put(emit coproc.Emit) error {
	for rest := h.data; len(rest) > 0; {
		var key, value []byte
		var ok bool
		if key, value, rest, ok = coproc.CutRecord(rest); !ok {
			return errors.New("output of a second attempt is damaged")
		}
		if err := emit(key, value); err != nil {
			return err
		}
	}
	return nil
}

// straggler is a part that may have a second attempt.
type straggler struct {
	j *Job
	p *Part
}

// secondKey is where the sightings of a second attempt are.
func secondKey(p *Part) string { return "second/" + string(partKey(p.Job, p.Phase, p.Index)) }

// seconded says whether a second attempt of a part runs: other workers leave the part to it.
func (w *worker) seconded(p *Part) bool {
	return p.Second.Runs() && w.still(secondKey(p), p.Second.Beat) <= w.Lease
}

// stranded says whether an attempt of this worker has returned, and how it ended is not recorded. While the worker's session lasts no one else takes the
// part, and its second attempt waits for it.
func (w *worker) stranded(p *Part) bool {
	return p.State == Running && p.Session == w.session && !w.runs(p)
}

// stragglers are the parts of a phase that run elsewhere for too long, by this worker's clock from when it has first seen
// the attempt: when half of the parts are done and none waits, those that take longer than slowBy times the median of
// the ones that are done, and than a lease. There are none while a worker is there that does not know of second attempts: it would take them out of
// the records that it changes, again and again, and would not wait for them before it cleans up.
func (w *worker) stragglers(j *Job, parts []*Part) (slow []straggler) {
	if j.Phase != phaseMap && j.Phase != phaseReduce || len(j.Spec.Writes) > 0 || j.Spec.MaxRunning > 0 || w.staff.Load().format < 1 {
		return nil
	}
	var took []time.Duration
	for _, p := range parts {
		switch p.State {
		case Pending:
			return nil
		case Done:
			took = append(took, p.Took)
		}
	}
	if 2*len(took) < len(parts) {
		return nil
	}
	slices.Sort(took)
	limit := max(w.Lease, slowBy*took[len(took)/2])
	for _, p := range parts {
		if p.State != Running || p.Second != nil || p.Attempt >= MaxAttempts || p.Worker == w.Name || p.Session == w.session {
			continue
		}
		if w.still("slow/"+string(partKey(p.Job, p.Phase, p.Index)), uint64(p.Attempt)) > limit {
			slow = append(slow, straggler{j, p})
		}
	}
	return slow
}

// beginSecond claims the second attempt of one of these parts.
// Linearizes at: the swap of the part's record.
func (w *worker) beginSecond(ctx context.Context, slow []straggler) (*Job, *Part, error) {
	for _, s := range slow {
		if !w.begins(s.p) {
			continue
		}
		s.p.Second = &Second{Worker: w.Name, Session: w.session, Beat: 1}
		err := w.store.swapPart(ctx, s.p)
		if err == nil {
			s.p.second = true
			w.Logger.Info("part takes long: second attempt begins", "part", s.p.String(), "first", s.p.Worker)
			return s.j, s.p, nil
		}
		w.ends(s.p)
		if !errors.Is(err, errLost) {
			return nil, nil, err
		}
	}
	return nil, nil, nil
}

// workBeside runs the second attempt of a part, and takes the part with its result if the part's own attempt gives way
// to it. Its deadline is that of an attempt.
func (w *worker) workBeside(dctx context.Context, cancel context.CancelCauseFunc, j *Job, p *Part, e *env, began time.Time) error {
	e.held = &held{}
	result := make(chan attempt, 1)
	mine := *p
	go func() {
		a := attempt{Part: mine}
		a.Records, a.Emitted, a.Runs, a.Error = 0, 0, nil, ""
		a.err = w.attempt(dctx, j, &a.Part, e)
		if a.err == nil {
			a.err = e.held.err
		}
		result <- a
	}()
	a, ok := w.await(dctx, cancel, p.Job, func() error { return w.beatBeside(p, false) }, result, true)
	if !ok {
		w.Die(fmt.Sprintf("second attempt of %v: %v, and it does not stop", p, context.Cause(dctx)))
		a = <-result // Die of a test returns
	}
	if a.err == nil {
		a.err = w.takeBeside(dctx, p)
	}
	if a.err != nil {
		w.dropBeside(p, a, e)
		if errors.Is(context.Cause(dctx), errMemory) {
			w.Die(context.Cause(dctx).Error())
		}
		return nil
	}
	w.Tally.seconds[fateTaken].Add(1)
	done := make(chan attempt, 1)
	h := e.held
	e.held = nil
	mine = *p
	go func() {
		b := attempt{Part: mine}
		b.Records, b.Emitted, b.Runs, b.Error = a.Records, a.Emitted, a.Runs, ""
		if b.err = w.publish(dctx, h, e); b.err != nil && h.runs != nil {
			b.Runs = nil
			dropRuns(w.tidy, w.c, a.Runs)
			h.runs.release(w.tidy)
		}
		w.ends(&b.Part)
		done <- b
	}()
	w.conclude(dctx, cancel, j, p, e, began, done)
	return nil
}

// publish makes what a second attempt has held that of the part's own attempt.
// Preconditions: the attempt has taken the part.
func (w *worker) publish(ctx context.Context, h *held, e *env) (err error) {
	defer survive(&err)
	if h.runs != nil {
		return h.runs.count(ctx)
	}
	emit, flush, err := e.output(ctx)
	if err == nil {
		err = h.put(emit)
	}
	if err != nil {
		return err
	}
	return flush()
}

// changeBeside changes the record of a part for its second attempt here; errLost: it has none any more, or the part has
// ended.
func (w *worker) changeBeside(ctx context.Context, p *Part, change func(now *Part) bool) error {
	for {
		now, err := w.store.part(ctx, p)
		if err != nil {
			return err
		}
		now.second = true
		if !now.Second.Runs() || now.Second.Session != w.session || !change(now) {
			return errLost
		}
		if err = w.store.swapPart(ctx, now); err == nil {
			*p = *now
			return nil
		} else if !errors.Is(err, errLost) {
			return err
		}
	}
}

// beatBeside raises the beat of a second attempt. errLost ends it: the part has ended. Other errors are left to the next beat.
func (w *worker) beatBeside(p *Part, ready bool) error {
	err := w.changeBeside(w.tidy, p, func(now *Part) bool {
		now.Second.Beat, now.Second.Ready = now.Second.Beat+1, ready
		return !now.State.Ended()
	})
	if errors.Is(err, errLost) {
		return errLost
	}
	return nil
}

// takeBeside takes a part for its second attempt, which has a result, when the part's own attempt can change memory no
// more: it has given way or failed, or it is silent and fenced.
// Linearizes at: the swap of the part's record.
func (w *worker) takeBeside(ctx context.Context, p *Part) error {
	tick := time.NewTicker(min(w.Lease/6, idleMax))
	defer tick.Stop()
	for {
		if j, err := w.store.Job(ctx, p.Job); err == nil && j.State.Ended() {
			return errCancelled
		}
		if err := w.beatBeside(p, true); err != nil {
			return err
		}
		if p.Attempt > MaxAttempts {
			return fmt.Errorf("%w: the part has had %d attempts", errHeld, p.Attempt)
		}
		silent := p.State == Running && w.still(string(partKey(p.Job, p.Phase, p.Index)), p.Beat<<8|uint64(p.Attempt)) > w.Lease
		if (p.State == Pending || silent) && w.halted(ctx, p) {
			now := *p
			now.State, now.Worker, now.Life, now.Session, now.Attempt, now.Beat = Running, w.Name, w.Life, w.session, p.Attempt+1, p.Beat+1
			now.Second = &Second{Worker: w.Name}
			now.second = false
			switch err := w.store.swapPart(ctx, &now); {
			case err == nil:
				if *p = now; silent {
					w.Tally.takeovers.Add(1)
				}
				return nil
			case !errors.Is(err, errLost):
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// dropBeside frees what a second attempt has made, and records that it has ended. If it is unknown whether it has taken
// the part, the part's record names nothing of it, and the part is taken again when its beat stands still.
func (w *worker) dropBeside(p *Part, a attempt, e *env) {
	ctx, cancel := context.WithTimeout(w.tidy, w.Lease)
	defer cancel()
	defer w.ends(p)
	w.Tally.seconds[fateDropped].Add(1)
	w.Logger.Info("second attempt is dropped", "part", p.String(), "reason", a.err)
	dropRuns(ctx, w.c, a.Runs)
	if e.held.runs != nil {
		e.held.runs.release(ctx)
	}
	e.giveUp(ctx)
	err := w.changeBeside(ctx, p, func(now *Part) bool {
		now.Second.Session, now.Second.Ready = client.Session{}, false
		return true
	})
	if err != nil && !errors.Is(err, errLost) {
		w.Logger.Warn("end of a second attempt is not recorded", "part", p.String(), "error", err)
	}
}
