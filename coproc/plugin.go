package coproc

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/proto"
)

// Ref names an object for ever.
type Ref = proto.Ref

// Emit gives a record to the next phase: the shuffle, or the output. It copies key and value.
// The plugin must return its error, which ends the part.
type Emit func(key, value []byte) error

// Plugin is the program of a job. Each attempt of each part has its own instance, which is
// never called from two goroutines. Slices that it is given are valid during the call only.
type Plugin interface {
	// Map is called for every record of the part, in no promised order.
	Map(env Env, key, value []byte, emit Emit) error
}

// Func is a plugin that is called on one object by Call: it is given the object's payload and the caller's arguments, and returns the
// payload that replaces it, nil for none, and the answer. It may be called again, on another payload, when the object has changed meanwhile, so
// its answer must follow from what it is given.
//
//	coproc.Register("append", "appends to an object", func() coproc.Plugin {
//		return coproc.Func(func(object, args []byte) (next, answer []byte, err error) { return append(object, args...), nil, nil })
//	})
//
// As a plugin of a job it maps each record's value, with the key as arguments.
type Func func(object, args []byte) (next, answer []byte, err error)

// Keys of the records that a Func emits.
const (
	NextObject = "object"
	FuncAnswer = "answer"
)

// Map calls the function.
func (f Func) Map(_ Env, key, value []byte, emit Emit) error {
	next, answer, err := f(value, key)
	if err == nil && next != nil {
		err = emit([]byte(NextObject), next)
	}
	if err == nil {
		err = emit([]byte(FuncAnswer), answer)
	}
	return err
}

// Reducer is a plugin whose emitted records are brought together by key. Without
// it they are the output.
type Reducer interface {
	// Reduce is called once for each key, keys in order.
	Reduce(env Env, key []byte, values iter.Seq[[]byte], emit Emit) error
}

// Combiner shrinks what a map part emits before it leaves the worker. It may be
// called never, or many times for one key, with its own output.
type Combiner interface {
	Combine(env Env, key []byte, values iter.Seq[[]byte], emit Emit) error
}

// Finisher is called when a map part has no more records.
type Finisher interface {
	Finish(env Env, emit Emit) error
}

// Env is what a plugin sees of the cluster. Writing outside of what the part may
// write is refused with ErrOutside.
type Env interface {
	// Context ends when the job is cancelled, the part is lost to another worker, or
	// its deadline has passed.
	Context() context.Context
	Deadline() time.Time
	// Arg is an argument of the job, or what stands in for it.
	Arg(name, missing string) string
	Part() Part
	// Progress reports how far the part is, for status; without it the count of records is shown.
	Progress(done, of uint64)
	// Logf writes a line to the job's log; the last lines of each part are kept.
	Logf(format string, args ...any)

	// Alloc makes an object. It belongs to the part until the part emits its Ref
	// somewhere; objects of an attempt that fails are freed.
	Alloc(payload []byte) (Ref, error)
	// Read appends an object's payload to dst.
	Read(ref Ref, dst []byte) ([]byte, error)
	// Write and Free change objects that this part has allocated.
	Write(ref Ref, payload []byte) error
	Free(ref Ref) error
	// Lookup finds a friendly name.
	Lookup(name string) (Ref, error)
	// Tree opens a tree. Only the job's output and what the job names as writable
	// can be written.
	Tree(name string) (Tree, error)
}

// Tree is an ordered key-value store.
type Tree interface {
	// Get appends the key's value to dst; ErrNoKey if there is none.
	Get(key, dst []byte) ([]byte, error)
	Put(key, value []byte) error
	Delete(key []byte) error
	// Scan calls f with from <= key < to in order, until it returns false; a nil to
	// is the end, limit 0 means all.
	Scan(from, to []byte, limit int, f func(key, value []byte) bool) error
}

// Phase of a job.
type Phase string

const (
	PhaseMap    Phase = "map"
	PhaseReduce Phase = "reduce"
	// PhaseCombine is a Reduce inside of a map part.
	PhaseCombine Phase = "combine"
)

// Part is what a plugin's instance works on.
type Part struct {
	Job     uint64 `json:"job"`     // number of the job
	Phase   Phase  `json:"phase"`   // plan, map, combine or reduce
	Index   int    `json:"index"`   // from 0
	Of      int    `json:"of"`      // parts of this phase
	Attempt int    `json:"attempt"` // from 1
}

func (p Part) String() string {
	return fmt.Sprintf("job %d %s part %d of %d, attempt %d", p.Job, p.Phase, p.Index+1, p.Of, p.Attempt)
}

// About describes a plugin.
type About struct {
	Name     string `json:"name"`     // that jobs name it by
	Summary  string `json:"summary"`  // one line for lists
	Reduces  bool   `json:"reduces"`  // it implements Reducer
	Combines bool   `json:"combines"` // it implements Combiner
	WASM     bool   `json:"wasm"`     // it is an uploaded module
}

var registry struct {
	sync.Mutex
	plugins map[string]registered
}

type registered struct {
	about About         // as Register was told
	make  func() Plugin // makes an instance for one part
}

// Register makes a plugin known to the workers it is compiled into. It panics when
// the name is taken or empty: both are mistakes of the program.
func Register(name, summary string, make func() Plugin) {
	registry.Lock()
	defer registry.Unlock()
	if _, taken := registry.plugins[name]; taken || name == "" || make == nil {
		panic(fmt.Sprintf("coproc: plugin %q is registered twice, or has no name", name))
	}
	if registry.plugins == nil {
		registry.plugins = map[string]registered{}
	}
	registry.plugins[name] = registered{Describe(name, summary, make()), make}
}

// Describe says what a plugin can do.
func Describe(name, summary string, p Plugin) About {
	a := About{Name: name, Summary: summary}
	_, a.Reduces = p.(Reducer)
	_, a.Combines = p.(Combiner)
	return a
}

// Lookup finds a registered plugin.
func Lookup(name string) (about About, make func() Plugin, ok bool) {
	registry.Lock()
	defer registry.Unlock()
	r, ok := registry.plugins[name]
	return r.about, r.make, ok
}

// Registered lists the plugins of this program by name.
func Registered() []About {
	registry.Lock()
	defer registry.Unlock()
	var all []About
	for _, r := range registry.plugins {
		all = append(all, r.about)
	}
	slices.SortFunc(all, func(a, b About) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return all
}
