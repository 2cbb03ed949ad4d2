package job

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/proto"
)

// Limits of what comes from outside.
const (
	MaxParts       = 4096
	MaxSlots       = 256 // of a worker
	MaxReduceParts = 256
	MaxArgs        = 64
	MaxArgBytes    = 4096
	MaxModuleBytes = 32 << 20
	MaxPartTimeout = 24 * time.Hour
	MaxLasts       = 30 * 24 * time.Hour
	MaxMemoryBytes = 4 << 30 // of an instance: WASM has 32-bit addresses
	// DefaultShuffleBytes of records between map and reduce, at most: a job that names no budget gets a quarter of the cluster's quota, at
	// least MinShuffleBytes. Reducing is for what a plugin can combine; sorting more than that is what other engines are for.
	DefaultShuffleBytes = 16 << 30
	MinShuffleBytes     = 64 << 20
	MaxShuffleBytes     = 1 << 40
	// MaxAttempts of one part.
	MaxAttempts = 4
	maxLogLines = 100
	maxLineLen  = 512
	maxErrorLen = 1000
)

// State of a job or a part.
type State string

const (
	Pending   State = "pending"
	Running   State = "running"
	Done      State = "done"
	Failed    State = "failed"
	Cancelled State = "cancelled"
)

// Ended says whether the state is final.
func (s State) Ended() bool { return s == Done || s == Failed || s == Cancelled }

// Phases of a job, in order. A job without reduce skips it.
const (
	phasePlan   = "plan"
	phaseMap    = string(coproc.PhaseMap)
	phaseReduce = string(coproc.PhaseReduce)
	// phaseReplace makes the output's name stand for what the parts have written, with Spec.Replace.
	phaseReplace = "replace"
)

// Spec is what a job is to do.
type Spec struct {
	Plugin string   `json:"plugin"`           // name of a compiled-in plugin or of a module
	Input  Source   `json:"input"`            // what map parts read
	Output string   `json:"output"`           // a tree; made if it is not there
	Writes []string `json:"writes,omitempty"` // trees that the plugin may change beside the output
	// Module is the SHA-256 of the module that Plugin names; Submit sets it.
	Module string            `json:"module,omitempty"`
	Args   map[string]string `json:"args,omitempty"` // for the plugin
	// MapParts, at most; 0 means four for each worker, and more where a part of a tree would have more than 64 MiB. ReduceParts; 0
	// means two for each worker.
	MapParts    int `json:"map_parts,omitempty"`
	ReduceParts int `json:"reduce_parts,omitempty"`
	// MaxRunning is how many parts run at once, at most; 0 means as many as there are slots. Such a job has no second attempts.
	MaxRunning int `json:"max_running,omitempty"`
	// Priority among the jobs of the tenant; "" is Normal.
	Priority Priority `json:"priority,omitempty"`
	// PartTimeout of one attempt of one part.
	PartTimeout time.Duration `json:"part_timeout_ns"`
	// MemoryBytes of one instance of a module, and CompileTimeout of it; 0 means the worker's
	// limits, which bound them. Compiled plugins have neither.
	MemoryBytes    int           `json:"memory_bytes,omitempty"`
	CompileTimeout time.Duration `json:"compile_timeout_ns,omitempty"`
	// ShuffleBytes is the budget of records between map and reduce, in bytes; 0 means a quarter of the cluster's quota, at most
	// DefaultShuffleBytes. A job that writes more fails.
	ShuffleBytes int64 `json:"shuffle_bytes,omitempty"`
	// Lasts is how long workers may act for the submitter; 0 means a day.
	Lasts time.Duration `json:"lasts_ns,omitempty"`
	// Keep is how long the records of the job stay after its end; 0 means DefaultKeep. A later submission
	// removes them.
	Keep time.Duration `json:"keep_ns,omitempty"`
	// Replace: the parts write a tree of their own, and when all are done the output's name stands for it. Nothing of
	// the former output is left; Linger is how long readers that have it open can go on reading it, 0 means DefaultLinger.
	Replace bool          `json:"replace,omitempty"`
	Linger  time.Duration `json:"linger_ns,omitempty"`
}

// Source of records: tree:NAME, redis:NAME#DATABASE or objects:PREFIX.
type Source struct {
	Tree    string `json:"tree,omitempty"`    // name; "" for objects
	Objects string `json:"objects,omitempty"` // prefix of names; "" for a tree
	// Redis says that the tree is a Redis gateway's: the records are the strings of
	// this database of it.
	Redis    bool `json:"redis,omitempty"`
	Database int  `json:"database,omitempty"` // of a Redis gateway's tree; 0 otherwise
	// From and To bound the keys of a tree.
	From, To []byte // included, and excluded; nil: no bound
}

const sources = "tree:NAME, redis:NAME, redis:NAME#DATABASE or objects:PREFIX"

// ParseSource reads what String writes.
func ParseSource(s string) (Source, error) {
	kind, rest, ok := strings.Cut(s, ":")
	switch {
	case ok && kind == "tree" && rest != "":
		return Source{Tree: rest}, nil
	case ok && kind == "redis" && rest != "":
		name, db, chosen := strings.Cut(rest, "#")
		s := Source{Tree: name, Redis: true}
		n, err := strconv.ParseUint(db, 10, 8)
		if s.Database = int(n); chosen && (err != nil || s.Database >= redis.Databases) || name == "" {
			return Source{}, fmt.Errorf("input %q: want redis:NAME, or redis:NAME#DATABASE with 0 to %d", "redis:"+rest, redis.Databases-1)
		}
		return s, nil
	case ok && kind == "objects" && rest != "":
		return Source{Objects: rest}, nil
	}
	return Source{}, fmt.Errorf("input %q: want %s", s, sources)
}

// String is the form that ParseSource reads.
func (s Source) String() string {
	switch {
	case s.Redis && s.Database != 0:
		return fmt.Sprintf("redis:%s#%d", s.Tree, s.Database)
	case s.Redis:
		return "redis:" + s.Tree
	case s.Tree != "":
		return "tree:" + s.Tree
	}
	return "objects:" + s.Objects
}

// keys are those of the tree that the source has.
func (s Source) keys() btree.Range {
	if !s.Redis {
		return btree.Range{From: s.From, To: s.To}
	}
	to := []byte{byte(s.Database + 1)}
	if len(s.To) > 0 {
		to = redis.AppendKey(nil, s.Database, s.To)
	}
	return btree.Range{From: redis.AppendKey(nil, s.Database, s.From), To: to}
}

// record is the record that a plugin gets for a key of the tree; false: it gets none.
func (s Source) record(key, value []byte, now time.Time) (k, v []byte, ok bool, err error) {
	if !s.Redis {
		return key, value, true, nil
	}
	v, ok, err = redis.CutString(value, now)
	return key[1:], v, ok, err
}

// check refuses a job that no worker could run.
func (s *Spec) check() error {
	switch {
	case s.Plugin == "":
		return fmt.Errorf("job: no plugin named")
	case (s.Input.Tree == "") == (s.Input.Objects == ""):
		return fmt.Errorf("job: want one input: " + sources)
	case s.Input.Database < 0 || s.Input.Database >= redis.Databases:
		return fmt.Errorf("job: input: database %d, want 0 to %d", s.Input.Database, redis.Databases-1)
	case s.Output == "":
		return fmt.Errorf("job: no output tree named")
	case s.Output == s.Input.Tree:
		return fmt.Errorf("job: %q is input and output: a part that ran twice would read what it has written", s.Output)
	case s.Output == StateTree || s.Input.Tree == StateTree:
		return fmt.Errorf("job: %q is the jobs' own tree", StateTree)
	}
	return s.checkLimits()
}

// checkLimits refuses what is above the limits of all jobs. 0 is accepted where it means a default.
func (s *Spec) checkLimits() error {
	size := 0
	for k, v := range s.Args {
		size += len(k) + len(v)
	}
	switch {
	case len(s.Args) > MaxArgs || size > MaxArgBytes:
		return fmt.Errorf("job: %d arguments of %d bytes, at most %d of %d", len(s.Args), size, MaxArgs, MaxArgBytes)
	case s.MapParts < 0 || s.MapParts > MaxParts:
		return fmt.Errorf("job: %d map parts, want 1 to %d", s.MapParts, MaxParts)
	case s.ReduceParts < 0 || s.ReduceParts > MaxReduceParts:
		return fmt.Errorf("job: %d reduce parts, want 1 to %d", s.ReduceParts, MaxReduceParts)
	case s.MaxRunning < 0 || s.MaxRunning > MaxParts:
		return fmt.Errorf("job: at most %d parts at once, want 1 to %d", s.MaxRunning, MaxParts)
	case s.PartTimeout < 0 || s.PartTimeout > MaxPartTimeout:
		return fmt.Errorf("job: part timeout %v, want more than 0 and at most %v", s.PartTimeout, MaxPartTimeout)
	case s.MemoryBytes != 0 && (s.MemoryBytes < wasmPage || s.MemoryBytes > MaxMemoryBytes):
		return fmt.Errorf("job: %d bytes of memory for an instance, want %d to %d", s.MemoryBytes, wasmPage, MaxMemoryBytes)
	case s.Lasts != 0 && (s.Lasts < time.Second || s.Lasts > MaxLasts):
		return fmt.Errorf("job: it lasts %v, want %v to %v", s.Lasts, time.Second, MaxLasts)
	case s.Keep != 0 && (s.Keep < time.Second || s.Keep > MaxKeep):
		return fmt.Errorf("job: it is kept for %v, want %v to %v", s.Keep, time.Second, MaxKeep)
	case s.Linger != 0 && !s.Replace:
		return fmt.Errorf("job: a former output lingers for %v, and the job does not replace its output", s.Linger)
	case s.Linger < 0 || s.Linger > MaxLinger:
		return fmt.Errorf("job: the former output lingers for %v, want more than 0 and at most %v", s.Linger, MaxLinger)
	case s.ShuffleBytes < 0 || s.ShuffleBytes > MaxShuffleBytes:
		return fmt.Errorf("job: %d bytes of records between map and reduce, want more than 0 and at most %d", s.ShuffleBytes, int64(MaxShuffleBytes))
	case s.Priority.check() != nil:
		return s.Priority.check()
	case s.CompileTimeout < 0:
		return fmt.Errorf("job: compile timeout %v, want more than 0", s.CompileTimeout)
	}
	return nil
}

// shuffleBytes is the budget with its default.
func (s *Spec) shuffleBytes() uint64 { return uint64(cmp.Or(s.ShuffleBytes, DefaultShuffleBytes)) }

// Job is a job as it stands.
type Job struct {
	ID      uint64    `json:"id"`              // drawn from the record "next"; never used again
	Spec    Spec      `json:"spec"`            // as submitted, with defaults filled in
	State   State     `json:"state"`           // Running until the last phase is done, or Failed or Cancelled
	Phase   string    `json:"phase"`           // whose parts are to run now
	Maps    int       `json:"maps"`            // parts of the map phase; 0 until the plan is done
	Reduces int       `json:"reduces"`         // parts of the reduce phase; 0: the plugin does not reduce
	Created time.Time `json:"created"`         // UTC
	Ended   time.Time `json:"ended,omitzero"`  // UTC; zero until then
	Error   string    `json:"error,omitempty"` // why it failed
	// Delegated says that workers act for the submitter: they have a delegation for the job.
	Delegated bool `json:"delegated,omitempty"`
	// Queued says that the job has a place in the queue for the cluster's quota of records between map and reduce: it is planned once it is
	// admitted, and leaves when those records are freed. Jobs that do not reduce have none.
	Queued bool `json:"queued,omitempty"`
	// Freed says that the intermediate results of an ended job are freed, and that a former output lingers.
	Freed bool `json:"freed,omitempty"`

	version uint64 // of the record when it was read; a change is conditional on it
}

// runsOn says whether a worker has the plugin: any worker runs a module.
func (j *Job) runsOn(w *Worker) bool {
	return j.Spec.Module != "" || slices.ContainsFunc(w.Plugins, func(a coproc.About) bool { return a.Name == j.Spec.Plugin })
}

// digest is of all that a submitter decides.
func (j *Job) digest() []byte {
	d := sha256.Sum256(encode(struct {
		ID   uint64
		Spec Spec
	}{j.ID, j.Spec}))
	return d[:]
}

// check refuses a record of a job that goes on if Submit and workers do not write such ones: the digest is of
// the ID and the Spec alone, and a submitter may give the digest of any Spec.
func (j *Job) check(id uint64) error {
	phase := j.Phase == phasePlan || j.Phase == phaseMap || j.Phase == phaseReduce || j.Phase == phaseReplace && j.Spec.Replace
	switch err := j.Spec.check(); {
	case j.ID != id:
		return fmt.Errorf("job %d: %w: it is that of job %d", id, errDamaged, j.ID)
	case j.State.Ended():
		return nil
	case err != nil:
		return fmt.Errorf("job %d: %w: %w", id, errDamaged, err)
	case j.State != Running || !phase || j.Spec.MapParts < 1 || j.Maps < 0 || j.Maps > MaxParts || j.Reduces < 0 || j.Reduces > MaxReduceParts:
		return fmt.Errorf("job %d: %w: state %q, phase %q with %d map parts, planned as %d, and %d reduce parts", id, errDamaged, j.State, j.Phase, j.Maps, j.Spec.MapParts, j.Reduces)
	}
	return nil
}

// Part is one part as it stands.
type Part struct {
	Job     uint64 `json:"job"`               // number of the job
	Phase   string `json:"phase"`             // plan, map, reduce or replace
	Index   int    `json:"index"`             // within the phase, from 0
	State   State  `json:"state"`             // Pending, Running under Worker, or final
	Attempt int    `json:"attempt,omitempty"` // begun so far; MaxAttempts of them, without one that has given way, fail the job
	Worker  string `json:"worker,omitempty"`  // name of the one that runs it, or ran it last
	Life    uint64 `json:"life,omitempty"`    // of that worker's process, see Config.Life; 0: unknown
	Beat    uint64 `json:"beat,omitempty"`    // raised by the worker while it runs; one that stands still for a lease may be taken over
	// Session under which the last attempt changes memory; zero once that attempt has ended. Another worker
	// begins no attempt, and frees nothing, before this session is fenced.
	Session client.Session `json:"session,omitzero"`
	// Second attempt of the part, which runs beside it, or has; a part gets one at most.
	Second *Second `json:"second,omitempty"`
	// Yielded says that one of the attempts has given way to Second. None does so after it, so that Attempt stays within what workers of
	// earlier versions accept.
	Yielded bool `json:"yielded,omitempty"`
	// Node that holds the part's memory, by id; 0 means any.
	Node uint32 `json:"node,omitempty"`
	// What to read: a range of keys, or objects.
	From    []byte   `json:"from,omitempty"`
	To      []byte   `json:"to,omitempty"`
	Objects []Object `json:"objects,omitempty"`
	Apart   bool     `json:"apart,omitempty"` // the objects are in a record of their own

	Records uint64        `json:"records,omitempty"` // read, of the attempt that is recorded as done
	Emitted uint64        `json:"emitted,omitempty"` // records, of that attempt
	Done    uint64        `json:"done,omitempty"`    // progress of the present attempt: done of Of
	Of      uint64        `json:"of,omitempty"`      // 0: unknown
	Took    time.Duration `json:"took_ns,omitempty"` // of the attempt that ended last
	Error   string        `json:"error,omitempty"`   // of the last attempt that failed
	Log     []string      `json:"log,omitempty"`     // last lines of the plugin and of failed attempts; at most maxLogLines
	// Runs of a map part: for each reduce part its sorted runs, each a list of objects.
	Runs [][][]proto.Ref `json:"runs,omitempty"`

	// Plan of the plan part: the map parts.
	Plan []*Part `json:"plan,omitempty"`

	second  bool   // this worker has begun its second attempt
	queued  bool   // its last attempt here has handed it back: the worker looks at other jobs first
	version uint64 // of the record when it was read; a change is conditional on it
}

// Object of the input, as its name stood when the plan was made.
type Object struct {
	Name string    `json:"name"` // in the placement library, when the plan was made
	Ref  proto.Ref `json:"ref"`  // a name that is given to another object later does not change the input
}

// check refuses a record that is not of the part that its key names.
func (p *Part) check(key []byte, id uint64) error {
	if p.Job != id || p.Index < 0 || p.Index >= MaxParts || !bytes.Equal(key, partKey(id, p.Phase, p.Index)) || p.Attempt < 0 || p.Attempt > MaxAttempts+1 {
		return fmt.Errorf("job %d: %w: record %q is of %v, attempt %d", id, errDamaged, key, p, p.Attempt)
	}
	return nil
}

// planned are the map parts that the plan part of a job has.
func planned(id uint64, parts []*Part) ([]*Part, error) {
	if len(parts) != 1 || len(parts[0].Plan) > MaxParts {
		return nil, fmt.Errorf("job %d: %w: it has %d plans, or one of more than %d parts", id, errDamaged, len(parts), MaxParts)
	}
	for i, p := range parts[0].Plan {
		if p == nil || p.Job != id || p.Phase != phaseMap || p.Index != i || p.State != Pending {
			return nil, fmt.Errorf("job %d: %w: part %d of its plan", id, errDamaged, i+1)
		}
	}
	return parts[0].Plan, nil
}

// spent is how many of its MaxAttempts the part has used: an attempt that has given way counts as none.
func (p *Part) spent() int {
	if p.Yielded {
		return p.Attempt - 1
	}
	return p.Attempt
}

// String names the part, for logs and errors.
func (p *Part) String() string { return fmt.Sprintf("job %d %s part %d", p.Job, p.Phase, p.Index+1) }

// log adds a line to the part's record, in the place of the oldest.
func (p *Part) log(line string) {
	if len(line) > maxLineLen {
		line = line[:maxLineLen] + "..."
	}
	if len(p.Log) >= maxLogLines {
		p.Log = p.Log[1:]
	}
	p.Log = append(p.Log, line)
}

// Worker is a registered worker.
type Worker struct {
	Name    string         `json:"name"`    // unique among workers
	Node    uint32         `json:"node"`    // number of the node beside which it runs; 0: none
	Plugins []coproc.About `json:"plugins"` // compiled into it
	Beat    uint64         `json:"beat"`    // raised every third of a lease; another worker removes a record whose beat stands still
	Host    string         `json:"host"`    // name of its host
	// Format of records that it reads and writes: 1 has second attempts, and objects apart from their parts, 2 has Spec.MaxRunning, 3 has Spec.Priority. 0: an earlier version.
	Format int `json:"format,omitempty"`
}

// format is that of this version.
const format = 3

// encode is the value of a record.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data
	}
	return b
}
