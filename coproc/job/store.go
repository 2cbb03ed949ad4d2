package job

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// StateTree holds the records of all jobs.
const StateTree = quarrypb.JobsTree

var (
	// ErrNoJob: no job has that number.
	ErrNoJob = errors.New("no such job")
	// ErrNoPlugin: neither a worker nor a module has that name.
	ErrNoPlugin = errors.New("no such plugin")
	// errLost: another worker has taken the part over.
	errLost = errors.New("part is another worker's now")
	// errForged: the record says something else than its submitter has delegated.
	errForged = errors.New("its record is not what its submitter has delegated: it has been changed since")
	// errDamaged: a record says what no program of this package writes.
	errDamaged = errors.New("its records are damaged, or were changed by another program")
)

// Store reads and changes the records of jobs.
type Store struct {
	c *client.Client // the process's client
	t *kv.Tree       // StateTree
	// d is what a worker acts by; nil for a worker with rights of its own, and for others.
	d *client.Delegation
}

// Open opens the jobs of a cluster, and makes their tree if there is none.
func Open(ctx context.Context, c *client.Client) (*Store, error) {
	for {
		t, err := kv.Open(ctx, c, StateTree, btree.Config{})
		if errors.Is(err, client.ErrNoName) {
			if t, err = kv.Create(ctx, c, StateTree, btree.Config{}); errors.Is(err, client.ErrNameExists) {
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("jobs: %w", err)
		}
		return &Store{c: c, t: t}, nil
	}
}

// jobKey is where a job's record is.
func jobKey(id uint64) []byte { return fmt.Appendf(nil, "job/%012d", id) }

// activeKey is the marker of a job that has not ended.
func activeKey(id uint64) []byte { return fmt.Appendf(nil, "active/%012d", id) }

// partKey is where a part's record is.
func partKey(id uint64, phase string, n int) []byte {
	return fmt.Appendf(nil, "part/%012d/%s/%06d", id, phase, n)
}

// workerKey is where a worker's record is.
func workerKey(name string) []byte { return append([]byte("worker/"), name...) }

// after is the end of the range of keys with a prefix.
func after(prefix []byte) []byte {
	to := slices.Clone(prefix)
	to[len(to)-1]++
	return to
}

// prefixed is the range of keys with a prefix.
func prefixed(prefix string) btree.Range {
	return btree.Range{From: []byte(prefix), To: after([]byte(prefix))}
}

// Submit records a job and returns its number.
func (s *Store) Submit(ctx context.Context, spec Spec) (*Job, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if spec.PartTimeout == 0 {
		spec.PartTimeout = 10 * time.Minute
	}
	if err := spec.check(); err != nil {
		return nil, err
	}
	about, err := s.plugin(ctx, spec.Plugin)
	if err != nil {
		return nil, err
	}
	if !about.WASM && (spec.MemoryBytes != 0 || spec.CompileTimeout != 0) {
		return nil, fmt.Errorf("job: plugin %s is compiled into the workers: only a WASM module has a limit of memory or of the time to compile it", spec.Plugin)
	}
	var input *kv.Tree
	if spec.Input.Tree != "" {
		if input, err = kv.Open(ctx, s.c, spec.Input.Tree, btree.Config{}); err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
	}
	if spec.Priority == Normal {
		spec.Priority = "" // as earlier versions have it
	}
	if err := s.mayAsk(ctx, &spec); err != nil {
		return nil, err
	}
	s.forgetExpired(ctx, time.Now())
	workers, err := s.Workers(ctx)
	if err != nil {
		return nil, err
	}
	if spec.MapParts == 0 {
		bytes, err := inputSize(ctx, input, spec.Input)
		if err != nil {
			return nil, fmt.Errorf("input: %w", err)
		}
		spec.MapParts = mapParts(len(workers), bytes)
	}
	if spec.ReduceParts == 0 {
		spec.ReduceParts = min(MaxReduceParts, max(2, 2*len(workers)))
	}
	j := &Job{Spec: spec, State: Running, Phase: phasePlan, Created: time.Now().UTC()}
	if about.Reduces {
		j.Reduces = spec.ReduceParts
	}
	if about.WASM {
		m, err := s.module(ctx, spec.Plugin)
		if err != nil {
			return nil, err
		}
		j.Spec.Module = m.SHA256
	}
	if err := s.place(ctx, j); err != nil {
		return nil, err
	}
	if j.Delegated, err = s.c.Jobs().Delegate(ctx, j.ID, j.digest(), spec.Lasts); err != nil {
		s.leave(context.WithoutCancel(ctx), j)
		return nil, fmt.Errorf("job: workers cannot act for its submitter: %w", err)
	}
	if err := s.record(ctx, j); err != nil {
		if j.Delegated {
			_ = s.c.Jobs().End(context.WithoutCancel(ctx), j.ID, false) // else it ends with its time
		}
		if !errors.Is(err, client.ErrUnknown) { // else a worker may see the job
			s.leave(context.WithoutCancel(ctx), j)
		}
		return nil, err
	}
	return j, nil
}

// record writes the records of a new job. The marker comes last: workers look for jobs by it, so they
// see the job when it is complete.
func (s *Store) record(ctx context.Context, j *Job) error {
	plan := &Part{Job: j.ID, Phase: phasePlan, State: Pending}
	if err := s.t.PutIfAbsent(ctx, partKey(j.ID, phasePlan, 0), encode(plan)); err != nil {
		return err
	}
	if err := s.t.PutIfAbsent(ctx, jobKey(j.ID), encode(j)); err != nil {
		return err
	}
	return s.t.Put(ctx, activeKey(j.ID), []byte(j.Spec.Priority))
}

// number draws the next job's number.
func (s *Store) number(ctx context.Context) (uint64, error) {
	key := []byte("next")
	for {
		b, v, err := s.t.GetVersion(ctx, key, nil)
		if errors.Is(err, btree.ErrNoKey) {
			if err = s.t.PutIfAbsent(ctx, key, []byte("1")); err != nil && !errors.Is(err, btree.ErrKeyExists) {
				return 0, err
			}
			continue
		}
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseUint(string(b), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("jobs: the record %q of %s is damaged: %q", key, StateTree, b)
		}
		_, err = s.t.PutIf(ctx, key, strconv.AppendUint(nil, n+1, 10), btree.IfVersion(v))
		if !errors.Is(err, btree.ErrConflict) {
			return n, err
		}
	}
}

// plugin reads what a plugin can do: from a worker that has it, or from the module.
func (s *Store) plugin(ctx context.Context, name string) (coproc.About, error) {
	mods, err := s.Modules(ctx)
	if err != nil {
		return coproc.About{}, err
	}
	workers, err := s.Workers(ctx)
	if err != nil {
		return coproc.About{}, err
	}
	known := map[string]coproc.About{}
	for _, w := range workers {
		for _, a := range w.Plugins {
			known[a.Name] = a
		}
	}
	for _, m := range mods {
		known[m.About.Name] = m.About
	}
	if a, ok := known[name]; ok {
		return a, nil
	}
	names := slices.Sorted(maps.Keys(known))
	if len(workers) == 0 {
		return coproc.About{}, fmt.Errorf("%w: %q, and no worker is there: start one with quarry worker", ErrNoPlugin, name)
	}
	return coproc.About{}, fmt.Errorf("%w: %q; there are %v; upload one with quarry job put", ErrNoPlugin, name, names)
}

// Job reads one job. A worker that acts for its submitter refuses one that was changed.
func (s *Store) Job(ctx context.Context, id uint64) (*Job, error) {
	j, err := s.read(ctx, id)
	if err == nil && s.d != nil && !j.State.Ended() && (id != s.d.Job || !bytes.Equal(j.digest(), s.d.Digest)) {
		return nil, fmt.Errorf("job %d of tenant %s: %w", id, s.d.Tenant, errForged)
	}
	return j, err
}

// read reads the record of a job as it is.
func (s *Store) read(ctx context.Context, id uint64) (*Job, error) {
	b, v, err := s.t.GetVersion(ctx, jobKey(id), nil)
	if errors.Is(err, btree.ErrNoKey) {
		return nil, fmt.Errorf("%w: %d", ErrNoJob, id)
	}
	if err != nil {
		return nil, err
	}
	j := &Job{version: v}
	if err := json.Unmarshal(b, j); err != nil {
		return nil, fmt.Errorf("job %d: %w: %w", id, errDamaged, err)
	}
	return j, nil
}

// Wait returns a job when it has ended.
func (s *Store) Wait(ctx context.Context, id uint64) (*Job, error) {
	return s.Follow(ctx, id, func(*Job) error { return nil })
}

// Follow calls show with the job again and again, and returns it when it has ended.
func (s *Store) Follow(ctx context.Context, id uint64, show func(*Job) error) (*Job, error) {
	goesOn := func() error {
		return fmt.Errorf("job %d goes on; quarry job cancel %d ends it: %w", id, id, ctx.Err())
	}
	pause := followMin
	for shown := false; ; shown = true {
		j, err := s.Job(ctx, id)
		if err != nil && shown && ctx.Err() != nil {
			return nil, goesOn()
		}
		if err != nil || j.State.Ended() {
			return j, err
		}
		if err := show(j); err != nil {
			return nil, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, goesOn()
		}
		pause = min(followMax, pause+pause/4)
	}
}

// A job is looked at often while it may be a short one.
const (
	followMin = time.Millisecond
	followMax = 20 * time.Millisecond
)

// Jobs lists all jobs, oldest first.
func (s *Store) Jobs(ctx context.Context) ([]*Job, error) {
	return list(ctx, s.t, prefixed("job/"), func(_ []byte, j *Job, v uint64) error {
		j.version = v
		return nil
	})
}

// Parts lists the parts of a job; phase "" means all phases.
func (s *Store) Parts(ctx context.Context, id uint64, phase string) ([]*Part, error) {
	prefix := fmt.Sprintf("part/%012d/", id)
	if phase != "" {
		prefix += phase + "/"
	}
	n := 0
	return list(ctx, s.t, prefixed(prefix), func(key []byte, p *Part, v uint64) error {
		if n++; n > MaxParts+MaxReduceParts+1 {
			return fmt.Errorf("job %d: %w: more than %d parts", id, errDamaged, MaxParts+MaxReduceParts+1)
		}
		p.version = v
		return p.check(key, id)
	})
}

// makeParts writes the records of new parts, in the order of their keys: those of one leaf together. Those that are there stay: another worker has made
// them, and may have claimed them.
func (s *Store) makeParts(ctx context.Context, parts []*Part) error {
	var writes []btree.Write
	for _, p := range parts {
		writes = append(writes, btree.Write{Key: partKey(p.Job, p.Phase, p.Index), Value: encode(p), Cond: btree.IfAbsent()})
	}
	for len(writes) > 0 {
		n, err := s.t.WriteRun(ctx, writes)
		if err != nil {
			return err
		}
		for _, w := range writes[:n] {
			if w.Err != nil && !errors.Is(w.Err, btree.ErrKeyExists) {
				return w.Err
			}
		}
		writes = writes[n:]
	}
	return nil
}

// list decodes the records of a range; damaged ones are an error, and those that note refuses.
func list[T any](ctx context.Context, t *kv.Tree, r btree.Range, note func(key []byte, v *T, version uint64) error) ([]*T, error) {
	var all []*T
	var bad error
	err := t.Scan(ctx, r, func(key, value []byte, version uint64) bool {
		v := new(T)
		if err := json.Unmarshal(value, v); err != nil {
			bad = fmt.Errorf("record %q of %s: %w: %w", key, StateTree, errDamaged, err)
			return false
		}
		if note != nil {
			if bad = note(key, v, version); bad != nil {
				return false
			}
		}
		all = append(all, v)
		return true
	})
	return all, errors.Join(err, bad)
}

// active are the jobs that have not ended, by their numbers; for a worker that acts for a submitter, its job.
func (s *Store) active(ctx context.Context) (jobs []active, err error) {
	if s.d != nil {
		switch p, err := s.t.Get(ctx, activeKey(s.d.Job), nil); {
		case errors.Is(err, btree.ErrNoKey):
			return nil, nil
		case err != nil:
			return nil, err
		default:
			return []active{{s.d.Job, Priority(p).class()}}, nil
		}
	}
	err = s.t.Scan(ctx, prefixed("active/"), func(key, p []byte, _ uint64) bool {
		if id, err := strconv.ParseUint(string(key[len("active/"):]), 10, 64); err == nil {
			jobs = append(jobs, active{id, Priority(p).class()})
		}
		return true
	})
	return jobs, err
}

// swapJob records a change of a job; btree.ErrConflict if another worker was faster.
func (s *Store) swapJob(ctx context.Context, j *Job) error {
	v, err := s.t.PutIf(ctx, jobKey(j.ID), encode(j), btree.IfVersion(j.version))
	if err == nil {
		j.version = v
	}
	return err
}

// swapPart records a change of a part; errLost if another worker has changed it.
func (s *Store) swapPart(ctx context.Context, p *Part) error {
	v, err := s.t.PutIf(ctx, partKey(p.Job, p.Phase, p.Index), encode(p), btree.IfVersion(p.version))
	if errors.Is(err, btree.ErrConflict) || errors.Is(err, btree.ErrNoKey) {
		return errLost
	}
	if err == nil {
		p.version = v
	}
	return err
}

// settlePart is swapPart until the answer is known, for the worker that runs the attempt: while its session lasts
// nothing but itself changes the record, so a conflict is an earlier change of its own without an answer. errLost:
// the record is of another attempt. ErrUnknown: it cannot be read either. A second attempt changes the record too, its
// own field alone: that is taken over.
func (s *Store) settlePart(ctx context.Context, session client.Session, p *Part) error {
	for {
		want := encode(p)
		err := s.swapPart(ctx, p)
		if !errors.Is(err, errLost) && !errors.Is(err, client.ErrUnknown) {
			return err
		}
		now, rerr := s.part(ctx, p)
		if errors.Is(rerr, errLost) {
			return errLost
		} else if rerr != nil {
			return fmt.Errorf("%w: %v: %w", client.ErrUnknown, p, rerr)
		}
		second := now.Second
		now.Second = p.Second
		switch {
		case bytes.Equal(encode(now), want): // it was done
			p.version, p.Second = now.version, second
			return nil
		case now.Session != session || now.Attempt != p.Attempt:
			return errLost
		}
		p.version, p.Second = now.version, second
	}
}

// part reads the record of a part as it is now; errLost: there is none, or none that can be read.
func (s *Store) part(ctx context.Context, p *Part) (*Part, error) {
	key := partKey(p.Job, p.Phase, p.Index)
	b, v, err := s.t.GetVersion(ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return nil, errLost
	} else if err != nil {
		return nil, err
	}
	now := &Part{version: v}
	if json.Unmarshal(b, now) != nil || now.check(key, p.Job) != nil {
		return nil, errLost
	}
	return now, nil
}

// end puts a job into its final state, unless it has one.
func (s *Store) end(ctx context.Context, id uint64, state State, reason string) error {
	for {
		j, err := s.read(ctx, id)
		if err != nil || j.State.Ended() {
			return err
		}
		j.State, j.Error, j.Ended = state, cut(reason, maxErrorLen), time.Now().UTC()
		if err := s.swapJob(ctx, j); errors.Is(err, btree.ErrConflict) {
			continue
		} else if err != nil {
			return err
		}
		return nil // the marker stays until a worker has cleaned up
	}
}

// cut shortens a text for a record.
func cut(s string, n int) string {
	if len(s) > n {
		return s[:n] + "..."
	}
	return s
}

// Revoke cancels a job, and ends the sessions that workers have opened for it: when it returns, no worker
// changes a byte for the job any more. What its parts have written stays, and intermediate results do until Forget.
func (s *Store) Revoke(ctx context.Context, id uint64) error {
	j, err := s.Job(ctx, id)
	if err != nil {
		return err
	}
	if j.State.Ended() {
		return fmt.Errorf("job %d has ended: it is %s", id, j.State)
	}
	if err := s.end(ctx, id, Cancelled, "revoked"); err != nil {
		return err
	}
	return s.c.Jobs().End(ctx, id, true)
}

// Cancel ends a job. Parts that run stop at their next beat.
func (s *Store) Cancel(ctx context.Context, id uint64) error {
	j, err := s.Job(ctx, id)
	if err != nil {
		return err
	}
	if j.State.Ended() {
		return fmt.Errorf("job %d has ended: it is %s", id, j.State)
	}
	return s.end(ctx, id, Cancelled, "cancelled")
}

// mayAsk refuses a cap or a priority while a worker is there that does not know of it. Workers that act for submitters compare the digest of the Spec, so
// earlier ones refuse the job.
func (s *Store) mayAsk(ctx context.Context, spec *Spec) error {
	need, what := 0, ""
	if spec.MaxRunning > 0 {
		need, what = 2, fmt.Sprintf("at most %d parts at once", spec.MaxRunning)
	}
	if spec.Priority != "" {
		need, what = 3, fmt.Sprintf("priority %s", spec.Priority)
	}
	if need == 0 {
		return nil
	}
	here, err := s.workersHere(ctx)
	if err != nil {
		return err
	}
	for _, w := range here {
		if w.Format < need {
			return fmt.Errorf("job: %s: worker %s is of an earlier version, which does not know this: replace it", what, w.Name)
		}
	}
	return nil
}

// Workers lists the workers that have registered: those that have rights of their own in the jobs' tree,
// the others with the controllers. One that has died is listed for some seconds.
func (s *Store) Workers(ctx context.Context) ([]*Worker, error) {
	here, err := s.workersHere(ctx)
	if err != nil {
		return nil, err
	}
	polling, err := s.c.Jobs().Workers(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range polling {
		if slices.ContainsFunc(here, func(w *Worker) bool { return w.Name == p.Name }) {
			continue
		}
		w := &Worker{Name: p.Name, Host: p.Host}
		w.Node, _ = s.c.Node(p.Node)
		if err := json.Unmarshal(p.Plugins, &w.Plugins); err != nil {
			return nil, fmt.Errorf("worker %s: its plugins: %w", p.Name, err)
		}
		here = append(here, w)
	}
	return here, nil
}

// Unserved says why no worker that is there now runs a job; "" if one can, or the job has ended.
func (s *Store) Unserved(ctx context.Context, j *Job) (string, error) {
	workers, err := s.Workers(ctx)
	if err != nil || j.State.Ended() || slices.ContainsFunc(workers, j.runsOn) {
		return "", err
	}
	if len(workers) == 0 {
		return "no worker is there: start one with quarry worker", nil
	}
	return fmt.Sprintf("none of the %d workers that are there has plugin %s: start one that has", len(workers), j.Spec.Plugin), nil
}

// workersHere are those with a record in the jobs' tree.
func (s *Store) workersHere(ctx context.Context) ([]*Worker, error) {
	return list[Worker](ctx, s.t, prefixed("worker/"), nil)
}
