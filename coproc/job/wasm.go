package job

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"github.com/tetratelabs/wazero/sys"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/internal/wasmcheck"
	"github.com/quarrystore/quarry/proto"
)

const (
	// DefaultMemoryBytes bounds the memory of one instance of a module.
	DefaultMemoryBytes = 256 << 20
	wasmPage           = 64 << 10
	// inputBytes of frames are made ready at a time.
	inputBytes = 64 << 10
	// describeTimeout bounds how long a module may take to answer with its About.
	describeTimeout = 10 * time.Second
	maxStderr       = 4 << 10
	// DefaultCompileTimeout bounds the compilation of a module by a worker between functions; one of 32 MiB takes seconds.
	DefaultCompileTimeout = 2 * time.Minute
	compilers             = 2
)

// compiledModules of this process, which may have several workers.
var compiledModules = wazero.NewCompilationCache()

// runtime compiles and runs modules. They have a clock and random numbers; no
// files, no network, no environment.
type runtime struct {
	wazero.Runtime
	ctx context.Context // of compiled code; outlives the parts
}

// newRuntime makes a runtime whose instances have at most so much memory.
func newRuntime(ctx context.Context, cfg wazero.RuntimeConfig, memoryBytes int) *runtime {
	// Modules are rewritten to call check. With WithCloseOnContextDone compiled loops would call the host at each turn.
	cfg = cfg.WithMemoryLimitPages(uint32(max(1, memoryBytes/wasmPage)))
	r := &runtime{wazero.NewRuntimeWithConfig(ctx, cfg), ctx}
	wasi_snapshot_preview1.MustInstantiate(experimental.WithFunctionListenerFactory(ctx, experimental.FunctionListenerFactoryFunc(checkCalls)), r)
	host := r.NewHostModuleBuilder(hostModule).NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(check), nil, nil).Export(checkFunction)
	if _, err := host.Instantiate(ctx); err != nil {
		panic(err) // a constant module in a new runtime
	}
	return r
}

// What a rewritten module imports.
const (
	hostModule    = "quarry"
	checkFunction = "check"
)

// check ends the module that calls it if its context has ended.
func check(ctx context.Context, m api.Module, _ []uint64) {
	if ctx.Err() == nil {
		return
	}
	_ = m.CloseWithExitCode(ctx, sys.ExitCodeContextCanceled)
	panic(sys.NewExitError(sys.ExitCodeContextCanceled)) // wazero's way to end a call
}

// checkCalls has check called before each call of the host: a module is charged for loops and calls, whatever they cost.
func checkCalls(api.FunctionDefinition) experimental.FunctionListener {
	return experimental.FunctionListenerFunc(func(ctx context.Context, m api.Module, _ api.FunctionDefinition, _ []uint64, _ experimental.StackIterator) {
		check(ctx, m, nil)
	})
}

// randoms are the random numbers of a module, in pieces, until the context ends. Each instance gets the same: an attempt
// that is repeated does what the first one did.
type randoms struct {
	ctx    context.Context
	source *rand.ChaCha8 // with a fixed seed
}

// Read gives random bytes to the module.
func (r *randoms) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.source.Read(p[:min(len(p), inputBytes)])
}

// close frees all compiled code.
func (r *runtime) close() { _ = r.Close(r.ctx) }

// describe asks a module for its About. An answer also shows that it is a plugin.
func (r *runtime) describe(ctx context.Context, wasm []byte) (about coproc.About, err error) {
	ctx, cancel := context.WithTimeout(ctx, describeTimeout)
	defer cancel()
	m, err := r.compile(ctx, wasm, describeTimeout)
	if err != nil {
		return about, fmt.Errorf("not a WASM module: %w", err)
	}
	defer m.Close(ctx)
	said := false
	g := &guest{handle: func(_ *guest, kind byte, a, _ []byte) error {
		if kind != coproc.FrameAbout {
			return coproc.ErrFrame
		}
		said = true
		return json.Unmarshal(a, &about)
	}}
	start, err := json.Marshal(coproc.Start{Describe: true})
	if err != nil {
		return about, err
	}
	g.in = coproc.AppendFrame(nil, coproc.FrameStart, start, nil)
	if err := r.run(ctx, m, g, DefaultMemoryBytes); err != nil {
		return about, err
	}
	if !said {
		return about, errors.New("the module is no plugin: it does not say what it is; build it with package coproc/guest")
	}
	return about, nil
}

// sleep ends with the context: the system's sleep would keep the worker for as long as a module
// likes, because a module that sleeps calls no check.
func sleep(ctx context.Context, ns int64) {
	t := time.NewTimer(time.Duration(ns))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// compile makes a module's machine code, with calls of check in it. With several compilers wazero
// looks at the context between functions, and with one it does not. A function that is being
// compiled is compiled to its end in any case; Insert bounds its size.
func (r *runtime) compile(ctx context.Context, wasm []byte, limit time.Duration) (wazero.CompiledModule, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("compiling takes longer than %v", limit))
	defer cancel()
	wasm, err := wasmcheck.Insert(wasm, hostModule, checkFunction)
	if err != nil {
		return nil, err
	}
	m, err := r.CompileModule(experimental.WithCompilationWorkers(ctx, compilers), wasm)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return m, err
}

// linear is the memory of one instance. It does not grow beyond its limit: the module's request
// for more memory fails, as when memory runs out.
type linear struct {
	b     []byte // the memory in use
	limit uint64 // bytes
}

// errFirstMemory is panicked with where wazero takes no error.
type errFirstMemory struct{ want, limit uint64 }

func (e errFirstMemory) Error() string {
	return fmt.Sprintf("the module begins with %d KiB of memory, the job allows %d KiB: raise --memory", e.want>>10, e.limit>>10)
}

// allocator is of the memory of one instance.
func allocator(limit int) experimental.MemoryAllocator {
	return experimental.MemoryAllocatorFunc(func(first, _ uint64) experimental.LinearMemory {
		if first > uint64(limit) {
			panic(errFirstMemory{first, uint64(limit)})
		}
		return &linear{make([]byte, 0, first), uint64(limit)}
	})
}

// Reallocate grows the memory; nil: beyond the limit.
func (l *linear) Reallocate(size uint64) []byte {
	if size > l.limit {
		return nil
	}
	if more := int(size) - len(l.b); more > 0 {
		l.b = append(l.b, make([]byte, more)...)
	}
	return l.b[:size]
}

// Free gives the memory up.
func (l *linear) Free() { l.b = nil }

// run instantiates a module with at most so many bytes of memory, and returns when its main
// function has.
func (r *runtime) run(ctx context.Context, m wazero.CompiledModule, g *guest, memoryBytes int) (err error) {
	defer func() {
		if p := recover(); p != nil {
			first, ok := p.(errFirstMemory)
			if !ok {
				panic(p)
			}
			err = first
		}
	}()
	ctx = experimental.WithMemoryAllocator(ctx, allocator(memoryBytes))
	g.ctx = ctx
	stderr := tail{ctx: ctx}
	cfg := wazero.NewModuleConfig().WithName("").WithStdin(g).WithStdout(g).WithStderr(&stderr).
		WithRandSource(&randoms{ctx, rand.NewChaCha8([32]byte{})}).WithSysWalltime().WithSysNanotime().WithNanosleep(func(ns int64) { sleep(ctx, ns) })
	mod, err := r.InstantiateModule(ctx, m, cfg)
	if mod != nil {
		_ = mod.Close(ctx)
	}
	var exit *sys.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 0 {
		err = nil
	}
	switch {
	case g.err != nil:
		return g.err // why the module was stopped
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		if s := bytes.TrimSpace(stderr.b); len(s) > 0 {
			return fmt.Errorf("module ends: %w: %s", err, s)
		}
		return fmt.Errorf("module ends: %w", err)
	}
	return nil
}

// tail keeps the beginning of what a module writes to standard error.
type tail struct {
	ctx context.Context
	b   []byte
}

// Write keeps the first maxStderr bytes.
func (t *tail) Write(p []byte) (int, error) {
	if t.ctx.Err() != nil {
		return 0, context.Cause(t.ctx)
	}
	t.b = append(t.b, p[:min(len(p), maxStderr-len(t.b))]...)
	return len(p), nil
}

// guest is a module's standard input and output. Both are called from inside of
// the module, one at a time.
type guest struct {
	ctx    context.Context                              // of the instance: reads and writes fail when it has ended; set by run
	in     []byte                                       // frames not yet read
	room   []byte                                       // the buffer of in
	owed   int                                          // bytes of in up to the end of an answer that is not read; 0: none
	more   func(dst []byte) []byte                      // appends frames; nothing at the end of the input
	out    []byte                                       // the bytes of an incomplete frame
	handle func(g *guest, kind byte, a, b []byte) error // called for each complete frame that the module writes
	err    error                                        // why the module was stopped; the next read or write of the module fails with it
}

// ended says why the module is stopped, if it is.
func (g *guest) ended() error {
	if g.err == nil && g.ctx.Err() != nil {
		g.err = context.Cause(g.ctx)
	}
	return g.err
}

// Read is a read of the module from its standard input.
func (g *guest) Read(p []byte) (int, error) {
	if err := g.ended(); err != nil {
		return 0, err
	}
	if len(g.in) == 0 && g.more != nil {
		g.room = g.more(g.room[:0])
		g.in = g.room
	}
	if len(g.in) == 0 {
		g.err = errors.New("the module asks for more than there is")
		return 0, g.err
	}
	n := copy(p, g.in)
	g.in = g.in[n:]
	g.owed = max(0, g.owed-n)
	return n, nil
}

// Write is a write of the module to its standard output: frames, in any pieces.
func (g *guest) Write(p []byte) (int, error) {
	if err := g.ended(); err != nil {
		return 0, err
	}
	b := p
	if len(g.out) > 0 {
		g.out = append(g.out, p...)
		b = g.out
	}
	for {
		kind, x, y, rest, ok, err := coproc.CutFrame(b)
		if err == nil && !ok {
			g.out = append(g.out[:0], rest...)
			return len(p), nil
		}
		if err == nil {
			err = g.ended() // a write may have many frames
		}
		if err == nil {
			b = rest
			err = g.handle(g, kind, x, y)
		}
		if err != nil {
			g.err = err
			return 0, err
		}
	}
}

// answer appends the answer to a call behind what the module has not read yet.
func (g *guest) answer(result []byte, err error) {
	text := ""
	if err != nil {
		text = err.Error()
		for _, e := range []error{coproc.ErrNoKey, coproc.ErrOutside} {
			if errors.Is(err, e) {
				text = e.Error()
			}
		}
	}
	g.room = coproc.AppendFrame(append(g.room[:0:0], g.in...), coproc.FrameAnswer, result, []byte(text))
	g.in = g.room
	g.owed = len(g.in)
}

// module is an uploaded plugin.
type module struct {
	coproc.About
	rt   *runtime              // that has compiled code
	code wazero.CompiledModule // machine code, shared by the instances of all parts
}

// about describes the plugin.
func (m *module) about() coproc.About { return m.About }

// mapPart runs a map part in an instance of its own: the module pulls records.
func (m *module) mapPart(e *env, in records, emit coproc.Emit) error {
	var failed error
	next, stop := iter.Pull2(func(yield func(key, value []byte) bool) {
		enough := errors.New("enough")
		if err := in(func(key, value []byte) error {
			if !yield(key, value) {
				return enough
			}
			return nil
		}); err != enough {
			failed = err
		}
	})
	defer stop()
	ended := false
	err := m.part(e, emit, func(dst []byte) []byte {
		for !ended && len(dst) < inputBytes {
			key, value, ok := next()
			if ended = !ok; ok {
				dst = coproc.AppendFrame(dst, coproc.FrameRecord, key, value)
			} else if failed == nil {
				dst = coproc.AppendFrame(dst, coproc.FrameEnd, nil, nil)
			}
		}
		return dst
	})
	if failed != nil {
		return failed
	}
	return err
}

// reduce runs Reduce or Combine in an instance of its own: the module pulls keys and values.
func (m *module) reduce(e *env, in groups, emit coproc.Emit) error {
	// Flattened: a group's key, its values, the next group's key.
	type frame struct {
		kind byte
		b    []byte
	}
	next, stop := iter.Pull(func(yield func(frame) bool) {
		for key, values := range in {
			if !yield(frame{coproc.FrameGroup, key}) {
				return
			}
			for v := range values {
				if !yield(frame{coproc.FrameValue, v}) {
					return
				}
			}
		}
	})
	defer stop()
	ended := false
	return m.part(e, emit, func(dst []byte) []byte {
		for !ended && len(dst) < inputBytes {
			f, ok := next()
			switch {
			case !ok:
				ended, dst = true, coproc.AppendFrame(dst, coproc.FrameEnd, nil, nil)
			case f.kind == coproc.FrameGroup:
				dst = coproc.AppendFrame(dst, f.kind, f.b, nil)
			default:
				dst = coproc.AppendFrame(dst, f.kind, nil, f.b)
			}
		}
		return dst
	})
}

// part runs one instance of the module.
func (m *module) part(e *env, emit coproc.Emit, more func(dst []byte) []byte) error {
	start, err := json.Marshal(coproc.Start{Part: e.part, Args: e.job.Spec.Args, MicrosLeft: time.Until(e.deadline).Microseconds()})
	if err != nil {
		return err
	}
	g := &guest{in: coproc.AppendFrame(nil, coproc.FrameStart, start, nil), more: more}
	done := false
	g.handle = func(g *guest, kind byte, a, b []byte) error {
		switch {
		case done:
			return coproc.ErrFrame
		case kind == coproc.FrameEmit:
			return emit(a, b)
		case kind == coproc.FrameLog:
			e.Logf("%s", cut(string(a), maxLineLen))
		case kind == coproc.FrameProgress && len(a) == 16:
			e.Progress(binary.LittleEndian.Uint64(a), binary.LittleEndian.Uint64(a[8:]))
		case kind == coproc.FrameCall:
			if g.owed > 0 { // answers are outside of the memory that a module may have: one at a time
				return fmt.Errorf("%w: a call before the answer to the last one is read", coproc.ErrFrame)
			}
			var c coproc.EnvCall
			if err := json.Unmarshal(a, &c); err != nil {
				return coproc.ErrFrame
			}
			g.answer(e.call(c, b))
		case kind == coproc.FrameDone:
			done = true
			if len(b) > 0 {
				return errors.New(cut(string(b), maxErrorLen))
			}
		default:
			return coproc.ErrFrame
		}
		return nil
	}
	if err := m.rt.run(e.ctx, m.code, g, cmp.Or(e.job.Spec.MemoryBytes, e.w.ModuleBytes)); err != nil {
		return err
	}
	if !done {
		return errors.New("the module has ended before its part")
	}
	return nil
}

// scanBytes bounds what one page of a scan answers.
const scanBytes = 1 << 20

// call carries out a module's call of its Env, and appends the answer.
func (e *env) call(c coproc.EnvCall, payload []byte) ([]byte, error) {
	var ref coproc.Ref
	var t *tree
	var err error
	switch c.Op {
	case "read", "write", "free":
		ref, err = proto.ParseRef(c.Ref)
	case "tree", "treeget", "treeput", "treedelete", "treescan":
		t, err = e.open(c.Name)
	}
	if err != nil {
		return nil, err
	}
	switch c.Op {
	case "alloc":
		ref, err := e.Alloc(payload)
		return []byte(ref.String()), err
	case "read":
		return e.Read(ref, nil)
	case "write":
		return nil, e.Write(ref, payload)
	case "free":
		return nil, e.Free(ref)
	case "lookup":
		ref, err := e.Lookup(c.Name)
		return []byte(ref.String()), err
	case "tree":
		return nil, nil
	case "treeget":
		return t.Get(c.Key, nil)
	case "treeput":
		return nil, t.Put(c.Key, payload)
	case "treedelete":
		return nil, t.Delete(c.Key)
	case "treescan":
		var page []byte
		err := t.Scan(c.Key, c.To, c.Limit, func(key, value []byte) bool {
			page = coproc.AppendRecord(page, key, value)
			return len(page) < scanBytes
		})
		return page, err
	}
	return nil, fmt.Errorf("no such call: %q", c.Op)
}
