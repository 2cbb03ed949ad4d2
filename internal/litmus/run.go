package litmus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma/verbs"
)

// Result is what one program has seen.
type Result struct {
	Name   string `json:"name"`
	Asks   string `json:"asks"`
	Must   bool   `json:"must"`   // anything bad loses data
	Rounds uint64 `json:"rounds"` // how often it was tried
	Bad    uint64 `json:"bad"`
	Note   string `json:"note,omitempty"`
	Error  string `json:"error,omitempty"`
	TookMs int64  `json:"took_ms"`
}

// OK says whether the device may carry Quarry, as far as this program can tell.
func (r *Result) OK() bool { return r.Error == "" && (r.Bad == 0 || !r.Must) }

// Report is all of them.
type Report struct {
	Device  verbs.Caps    `json:"device"`
	Results []Result      `json:"results"`
	Left    verbs.Objects `json:"objects_left"` // verbs objects not given back
}

// Err names the first program that must not fail and did.
func (r *Report) Err() error {
	for i := range r.Results {
		if x := &r.Results[i]; !x.OK() {
			if x.Error != "" {
				return fmt.Errorf("%w: %s: %s", ErrUnfit, x.Name, x.Error)
			}
			return fmt.Errorf("%w: %s: %d of %d", ErrUnfit, x.Name, x.Bad, x.Rounds)
		}
	}
	return nil
}

// ErrUnfit: the device does not do what the protocols rely on.
var ErrUnfit = errors.New("this device must not carry Quarry")

// program runs until its time is over; the counts are the answer.
type program struct {
	name, asks string
	must       bool
	run        func(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error)
}

var programs = []program{
	{"cas-cas", "increments by CAS from 4 queue pairs, lost", true, casCAS},
	{"add-add", "increments by FETCH_ADD from 4 queue pairs, lost", true, addAdd},
	{"write-read", "completed WRITEs that a READ elsewhere did not see", true, writeRead},
	{"write-cas", "WRITEs not seen by who saw the CAS behind them", true, writeCAS},
	{"read-write", "READs overtaken by the fenced WRITE behind them", true, readWrite},
	{"word", "aligned words of 8 bytes seen torn", true, tornWords},
	{"flush", "flushed WRITEs that a processor did not see", true, flushed},
	{"revoke", "fences after which a byte changed, 256 WRITEs under way", true, revoked},
	{"cas-write", "WRITEs lost to a CAS on the same word", false, casWrite},
	{"cpu-adapter", "increments lost between a processor and the adapter", false, cpuAdapter},
	{"write-order", "WRITEs of 4 KiB whose end came before their beginning", false, writeOrder},
}

// Run gives each program its time. A program that fails does not stop the others.
func Run(ctx context.Context, s *Stand, each time.Duration, progress func(done, of int)) []Result {
	var out []Result
	for i, p := range programs {
		if progress != nil {
			progress(i, len(programs))
		}
		start := time.Now()
		r := Result{Name: p.name, Asks: p.asks, Must: p.must}
		clear(s.Memory.Bytes()[:workBytes])
		err := ctx.Err()
		if err == nil {
			r.Rounds, r.Bad, r.Note, err = p.run(ctx, s, start.Add(each))
		}
		if err == nil && p.must && r.Rounds == 0 {
			err = fmt.Errorf("no round was done in %v: give it more time", each)
		}
		if err != nil {
			r.Error = err.Error()
		}
		r.TookMs = time.Since(start).Milliseconds()
		out = append(out, r)
	}
	return out
}

// workBytes of the region are what programs touch.
const workBytes = 2 << 20

// together runs f for each of n and returns the first error.
func together(n int, f func(i int) error) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}
