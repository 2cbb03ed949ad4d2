package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/client"
)

// Ops that can be measured.
var Ops = []string{"read", "update", "alloc", "free", "readmany", "writemany", "mix", "echo", KVInsert, KVLoad, KVGet, KVPut, KVMix, KVScan, KVFill}

// Job is one measurement: one kind of operation, one size.
type Job struct {
	Op       string        `json:"op"`
	Bytes    int           `json:"bytes"`
	Clients  int           `json:"clients"` // goroutines, of each process
	Duration time.Duration `json:"duration_ns"`
	Replicas int           `json:"replicas"`
	Durable  bool          `json:"durable"` // objects survive the loss of all power
	// Slab of objects and of nodes of trees; 0 means PAIR.
	Slab client.SlabKind `json:"slab"`
	// NodeBytes is the size of nodes of trees; 0 means btree.DefaultNodeBytes.
	NodeBytes int     `json:"node_bytes"`
	Batch     int     `json:"batch"`   // objects of a readmany or writemany
	Objects   int     `json:"objects"` // of each client
	Rate      float64 `json:"rate"`    // operations a second of each client; 0: as fast as it goes
}

// options of its objects.
func (j Job) options() client.AllocOptions {
	return client.AllocOptions{Tag: Tag, Replicas: j.Replicas, Durability: j.durability(), Slab: j.Slab}
}

func (j Job) durability() client.Durability {
	if j.Durable {
		return client.Durable
	}
	return client.Volatile
}

func (j Job) validate() error {
	switch {
	case !slices.Contains(Ops, j.Op):
		return fmt.Errorf("operation %q: want one of %v", j.Op, Ops)
	case j.Bytes < 0 || j.Bytes > client.MaxObjectBytes:
		return fmt.Errorf("size %d: want 0 to %d", j.Bytes, client.MaxObjectBytes)
	case j.Op == "echo" && j.Bytes > client.MaxEcho:
		return fmt.Errorf("echo of %d bytes: want 0 to %d", j.Bytes, client.MaxEcho)
	case j.Clients < 1 || j.Clients > 256:
		return fmt.Errorf("%d clients: want 1 to 256", j.Clients)
	case j.Duration <= 0 || j.Duration > time.Hour:
		return fmt.Errorf("duration %v: want up to 1h", j.Duration)
	case j.Batch < 1 || j.Batch > 4096:
		return fmt.Errorf("batch of %d: want 1 to 4096", j.Batch)
	case j.Objects < 0 || j.Objects > 1<<24:
		return fmt.Errorf("%d objects: want up to %d", j.Objects, 1<<24)
	case j.Slab == client.StagedSlab && j.Replicas != 1:
		return fmt.Errorf("%w, not %d", alloc.ErrStagedReplicas, j.Replicas)
	case j.Rate < 0:
		return fmt.Errorf("rate %v: want 0 or more", j.Rate)
	}
	return nil
}

// workingSetBytes is how much memory the objects of a client take unless told:
// far more than the caches, so that reads are cold.
const workingSetBytes = 48 << 20

func (j Job) objects() int {
	if j.Objects > 0 {
		return j.Objects
	}
	return max(j.Batch, min(400_000, workingSetBytes/j.Clients/max(j.Bytes, 64)), 16)
}

// Row is what came out.
type Row struct {
	What      string  `json:"what"` // provider, or name of the yardstick
	Op        string  `json:"op"`
	Bytes     int     `json:"bytes"`
	Clients   int     `json:"clients"`
	Processes int     `json:"processes"`
	Replicas  int     `json:"replicas,omitempty"`
	Batch     int     `json:"batch,omitempty"` // objects of one call; latency is the call's
	Ops       int64   `json:"ops"`             // objects
	Errors    int64   `json:"errors"`
	Seconds   float64 `json:"seconds"`
	OpsPerS   float64 `json:"ops_per_s"`
	MBPerS    float64 `json:"mb_per_s"` // 10^6 bytes of payload a second
	MinNS     int64   `json:"min_ns"`
	TypicalNS int64   `json:"typical_ns"` // median
	P99NS     int64   `json:"p99_ns"`
	P999NS    int64   `json:"p999_ns"`
	MaxNS     int64   `json:"max_ns"`
	Rounds    float64 `json:"rounds_per_op,omitempty"`
	Verbs     float64 `json:"verbs_per_op,omitempty"`
	// Fences are verbs that wait for those before them in their chain: each is a round trip more on a queue pair.
	Fences float64 `json:"fences_per_op,omitempty"`
	Allocs float64 `json:"allocs_per_op"`
	Note   string  `json:"note,omitempty"`
	// Of KVFill.
	Order       string  `json:"order,omitempty"`
	Keys        int     `json:"keys,omitempty"`
	BytesPerKey float64 `json:"bytes_per_key,omitempty"` // memory, of all replicas
}

// cost is what calls have taken.
type cost struct {
	Rounds, Verbs, Fences, Mallocs uint64
}

func (c *cost) add(s client.KindStats) {
	c.Rounds += s.Rounds
	c.Verbs += s.AllVerbs()
	c.Fences += s.Fences
}

func (c cost) plus(o cost) cost {
	return cost{c.Rounds + o.Rounds, c.Verbs + o.Verbs, c.Fences + o.Fences, c.Mallocs + o.Mallocs}
}

func (c cost) minus(o cost) cost {
	return cost{c.Rounds - o.Rounds, c.Verbs - o.Verbs, c.Fences - o.Fences, c.Mallocs - o.Mallocs}
}

// setCost: rounds and allocations are those of a call, verbs and fences of an object.
func (r *Row) setCost(c cost, calls, ops int64) {
	r.Rounds, r.Allocs = float64(c.Rounds)/float64(calls), float64(c.Mallocs)/float64(calls)
	r.Verbs, r.Fences = float64(c.Verbs)/float64(ops), float64(c.Fences)/float64(ops)
}

// outcome is what one process brings home; it travels between processes.
type outcome struct {
	Ops     int64
	Calls   int64
	Errors  int64
	First   string // error
	Elapsed time.Duration
	cost
	Hist []byte
	hist *hdrhistogram.Histogram
}

// Latencies from 1 ns to a minute, to three digits.
func newHist() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(time.Minute), 3) }

func record(h *hdrhistogram.Histogram, ns int64) {
	_ = h.RecordValue(min(max(ns, 1), int64(time.Minute)))
}

func (r *Row) quantiles(h *hdrhistogram.Histogram) {
	r.MinNS, r.MaxNS = h.Min(), h.Max()
	r.TypicalNS, r.P99NS, r.P999NS = h.ValueAtQuantile(50), h.ValueAtQuantile(99), h.ValueAtQuantile(99.9)
}

func (r *Row) rate(ops int64, elapsed time.Duration) {
	r.Ops, r.Seconds = ops, elapsed.Seconds()
	r.OpsPerS = float64(ops) / r.Seconds
	r.MBPerS = r.OpsPerS * float64(r.Bytes) / 1e6
}
