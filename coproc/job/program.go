package job

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime/debug"

	"github.com/quarrystore/quarry/coproc"
)

// records is the input of a map part. It calls f until f fails.
type records func(f func(key, value []byte) error) error

// groups are keys with their values.
type groups = iter.Seq2[[]byte, iter.Seq[[]byte]]

// program runs parts of a plugin: compiled in, or a module.
type program interface {
	// about describes the plugin.
	about() coproc.About
	// mapPart calls Map with each record of the part's input, and Finish after the last.
	mapPart(e *env, in records, emit coproc.Emit) error
	// reduce calls Reduce, or Combine if that is the phase of the env's part.
	reduce(e *env, in groups, emit coproc.Emit) error
}

// compiled is a plugin of this program.
type compiled struct {
	coproc.About
	make func() coproc.Plugin // makes an instance for one part
}

// about describes the plugin.
func (p compiled) about() coproc.About { return p.About }

// caught turns a panic of a plugin into an error.
func caught(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("plugin panics: %v\n%s", r, cut(string(debug.Stack()), maxErrorLen/2))
	}
}

// mapPart runs a map part. A panic of the plugin is an error of the attempt.
func (p compiled) mapPart(e *env, in records, emit coproc.Emit) (err error) {
	defer caught(&err)
	plugin := p.make()
	err = in(func(key, value []byte) error { return plugin.Map(e, key, value, emit) })
	if f, ok := plugin.(coproc.Finisher); ok && err == nil {
		err = f.Finish(e, emit)
	}
	return err
}

// reduce runs Reduce or Combine over groups of records.
func (p compiled) reduce(e *env, in groups, emit coproc.Emit) (err error) {
	defer caught(&err)
	var each func(coproc.Env, []byte, iter.Seq[[]byte], coproc.Emit) error
	plugin := p.make()
	if r, ok := plugin.(coproc.Reducer); ok {
		each = r.Reduce
	}
	if c, ok := plugin.(coproc.Combiner); ok && e.part.Phase == coproc.PhaseCombine {
		each = c.Combine
	}
	if each == nil {
		return errors.New("plugin does not reduce")
	}
	for key, values := range in {
		if err := e.ctx.Err(); err != nil {
			return err
		}
		if err := each(e, key, values, emit); err != nil {
			return err
		}
	}
	return nil
}

// runMap runs a map part into the shuffle, or into the output.
func (w *worker) runMap(ctx context.Context, prog program, j *Job, p *Part, e *env) error {
	counted := func(emit coproc.Emit) coproc.Emit {
		return func(key, value []byte) error {
			p.Emitted++
			return emit(key, value)
		}
	}
	in := func(f func(key, value []byte) error) error {
		return e.input(p, func(key, value []byte) error {
			p.Records++
			return f(key, value)
		})
	}
	if j.Reduces == 0 {
		emit, flush, err := e.output(ctx)
		if err != nil {
			return err
		}
		if err := prog.mapPart(e, in, counted(emit)); err != nil {
			return err
		}
		return flush()
	}
	s := newShuffle(ctx, w.c, j.Reduces)
	runs := w.written(ctx, p, j.Spec.shuffleBytes())
	s.wrote, s.note = &w.Tally.shuffled, runs.add
	if e.held != nil {
		e.held.runs = runs
	}
	if prog.about().Combines {
		ce := *e
		ce.part.Phase = coproc.PhaseCombine
		s.combine = func(g groups, emit coproc.Emit) error { return prog.reduce(&ce, g, emit) }
	}
	err := prog.mapPart(e, in, counted(s.emit))
	if err == nil {
		p.Runs, err = s.end()
	}
	if runs.over != nil {
		err = runs.over
	}
	if err != nil {
		p.Runs = nil
		s.drop(w.tidy)
		runs.release(w.tidy)
	}
	return err
}

// runReduce merges the runs of all map parts for a reduce part, and reduces each group.
func (w *worker) runReduce(ctx context.Context, prog program, j *Job, p *Part, e *env) error {
	maps, err := w.store.Parts(ctx, j.ID, phaseMap)
	if err != nil {
		return err
	}
	var runs [][]coproc.Ref
	for _, m := range maps {
		if m.State != Done {
			return fmt.Errorf("%v is %s", m, m.State)
		}
		if len(m.Runs) > p.Index {
			runs = append(runs, m.Runs[p.Index]...)
		}
	}
	emit, flush, err := e.output(ctx)
	if err != nil {
		return err
	}
	var failed error
	r := e.reads(fromRuns)
	defer r.flush()
	m := &merger{ctx: ctx, c: w.c, read: r, wrote: &w.Tally.shuffled, note: w.written(ctx, p, 0).add}
	defer m.drop(w.tidy)
	if runs, err = m.narrow(runs); err != nil {
		return err
	}
	counted := func(yield func([]byte, iter.Seq[[]byte]) bool) {
		for key, values := range merge(ctx, w.c, runs, r, &failed) {
			p.Records++
			if !yield(key, values) {
				return
			}
		}
	}
	err = prog.reduce(e, counted, func(key, value []byte) error {
		p.Emitted++
		return emit(key, value)
	})
	if err = errors.Join(failed, err); err != nil {
		return err
	}
	return flush()
}
