package job

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

// This file makes calls of functions on single objects, which clients send to the node beside which the worker runs (coproc.Call). A worker without rights of
// its own makes none: it would need the caller's, and has those of jobs alone.

const (
	// maxFunctionTries bounds how often a function is called because the object has changed meanwhile.
	maxFunctionTries = 16
	// functionShare is the part of the caller's time, in percent, that the worker has: the rest is for the answer.
	functionShare = 80
	// functionSlots bounds the calls that a worker makes at the same time.
	functionSlots = 4
)

// functionServer makes calls.
type functionServer struct {
	*worker
	ctx   context.Context // of all calls
	codes codes
}

// serveFunctions makes calls until ctx ends.
func (w *worker) serveFunctions(ctx context.Context) {
	if w.node == 0 || w.store.d != nil {
		return
	}
	s := &functionServer{worker: w, ctx: ctx}
	defer s.codes.compiles.Wait()
	f := client.Functions{Any: true, Slots: functionSlots, Call: s.function}
	for _, a := range w.me.Plugins {
		if len(a.Name) <= 64 {
			f.Names = append(f.Names, a.Name)
		}
	}
	if err := w.c.ServeFunctions(ctx, w.Node, f); err != nil && ctx.Err() == nil {
		w.Logger.Warn("worker makes no calls of functions", "error", err)
	}
}

// function calls a function on an object, and replaces the object by what the function makes of it unless it has changed meanwhile.
func (w *functionServer) function(ctx context.Context, q client.FunctionCall) (answer []byte, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, q.Within*functionShare/100, errDeadline)
	defer cancel()
	for range maxFunctionTries {
		object, info, err := w.c.ReadInfo(ctx, q.Ref, nil)
		if err != nil {
			return nil, err
		}
		next, answer, err := w.apply(ctx, q, object)
		if err == nil && len(answer) > client.MaxFunctionAnswer { // before anything is changed
			err = fmt.Errorf("the answer has %d bytes, at most %d", len(answer), client.MaxFunctionAnswer)
		}
		if err != nil || next == nil {
			return answer, err
		}
		if err = w.c.CompareAndWrite(ctx, q.Ref, info.Version, next); !errors.Is(err, client.ErrConflict) {
			return answer, err
		}
	}
	return nil, fmt.Errorf("%w: it has changed during %d calls", client.ErrBusy, maxFunctionTries)
}

// applied is what a function has made of an object.
type applied struct {
	next, answer []byte // next is nil: the object stays
	err          error
}

// apply runs a function on a payload. One that does not return in time, or takes more memory than the worker has, ends the worker, unless it is a
// module, which ends alone.
func (w *functionServer) apply(ctx context.Context, q client.FunctionCall, object []byte) (next, answer []byte, err error) {
	prog, release, err := w.functionNamed(ctx, q.Function)
	if err != nil {
		return nil, nil, err
	}
	e := newEnv(ctx, w.worker, &Job{Spec: Spec{Plugin: q.Function}}, coproc.Part{Phase: coproc.PhaseMap, Of: 1, Attempt: 1})
	e.bare = true
	done := make(chan applied, 1)
	go func() {
		defer release() // it may run on after the call
		done <- applyTo(prog, e, q.Args, object)
	}()
	weigh := time.NewTicker(weighEvery)
	defer weigh.Stop()
	var over <-chan time.Time
	for ended := ctx.Done(); ; {
		select {
		case a := <-done:
			if a.err != nil && context.Cause(ctx) != nil {
				a.err = context.Cause(ctx)
			}
			return a.next, a.answer, a.err
		case <-ended:
			ended, over = nil, time.After(stopTime)
		case <-over:
			w.Die(fmt.Sprintf("function %s: %v, and it does not stop", q.Function, context.Cause(ctx)))
			return nil, nil, context.Cause(ctx)
		case <-weigh.C:
			if w.ProcessBytes > 0 && heapBytes() > uint64(w.ProcessBytes) {
				w.Die(fmt.Sprintf("function %s: %v: %d MiB", q.Function, errMemory, w.ProcessBytes>>20))
				return nil, nil, errMemory
			}
		}
	}
}

// applyTo runs a function. A panic is its error: the worker makes calls of others, too.
func applyTo(prog program, e *env, args, object []byte) (a applied) {
	defer caught(&a.err)
	in := func(f func(key, value []byte) error) error { return f(args, object) }
	a.err = prog.mapPart(e, in, a.emit)
	return a
}

// emit takes what a function emits.
func (a *applied) emit(key, value []byte) error {
	switch string(key) {
	case coproc.NextObject:
		a.next = append([]byte{}, value...)
	case coproc.FuncAnswer:
		a.answer = append([]byte{}, value...)
	default:
		return fmt.Errorf("the plugin emits %.40q: it is no function (coproc.Func)", key)
	}
	return nil
}

// functionNamed finds a function: compiled in, or an uploaded module of the worker's tenant, which is compiled at its first call. Compiling
// goes on after the call has ended. release ends the use of what it returns.
func (w *functionServer) functionNamed(ctx context.Context, name string) (p program, release func(), err error) {
	if about, make, ok := coproc.Lookup(name); ok {
		return compiled{about, make}, func() {}, nil
	}
	m, err := w.store.module(ctx, name)
	if errors.Is(err, ErrNoPlugin) {
		err = fmt.Errorf("%w: %q is neither compiled into worker %s nor uploaded", client.ErrNoFunction, name, w.Name)
	}
	if err != nil {
		return nil, nil, err
	}
	if p, release := w.modules.take(m.SHA256); p != nil {
		return p, release, nil
	}
	err = w.codes.get(ctx, m.SHA256, func() error {
		_, release, err := w.compiled(w.ctx, m, w.CompileTimeout)
		if err == nil {
			release()
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("module %s: %w", name, err)
	}
	made, release := w.modules.take(m.SHA256)
	if made == nil {
		return nil, nil, fmt.Errorf("module %s: %w: others have taken its place: call again", name, client.ErrBusy)
	}
	return made, release, nil
}
