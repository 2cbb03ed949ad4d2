package litmus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma/verbs"
)

// Result is the outcome of one program.
type Result struct {
	Name   string `json:"name"`
	Asks   string `json:"asks"`
	Must   bool   `json:"must"`   // a device that fails it loses data
	Rounds uint64 `json:"rounds"` // how often the program ran its step
	Bad    uint64 `json:"bad"`
	Note   string `json:"note,omitempty"`
	Error  string `json:"error,omitempty"`
	TookMs int64  `json:"took_ms"`
}

// OK reports whether the device has passed this program, or need not pass it.
func (r *Result) OK() bool { return r.Error == "" && (r.Bad == 0 || !r.Must) }

// Report holds the results of all programs.
type Report struct {
	Device  verbs.Caps    `json:"device"`
	Results []Result      `json:"results"`
	Left    verbs.Objects `json:"objects_left"` // verbs objects that were not destroyed
}

// Err names the first program marked must that failed.
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

// ErrUnfit means that the device does not do what the protocols rely on.
var ErrUnfit = errors.New("this device must not carry Quarry")

// program runs until its time is over and returns its counts.
type program struct {
	name, asks string
	must       bool
	run        func(ctx context.Context, s *Stand, until time.Time) (rounds, bad uint64, note string, err error)
}

var programs = []program{
	{"cas-cas", "increments by CAS from 4 queue pairs, lost", true, casCAS},
	{"add-add", "increments by FETCH_ADD from 4 queue pairs, lost", true, addAdd},
	{"write-read", "completed WRITEs that a READ elsewhere did not see", true, writeRead},
	{"write-cas", "WRITEs not seen by a READ that saw the CAS behind them", true, writeCAS},
	{"read-write", "READs overtaken by the fenced WRITE behind them", true, readWrite},
	{"word", "aligned words of 8 bytes seen torn", true, tornWords},
	{"flush", "flushed WRITEs that a processor did not see", true, flushed},
	{"revoke", "fences after which a byte changed, 256 WRITEs under way", true, revoked},
	{"refused", "chains answered as not done whose WRITE, behind a refused READ, was executed", true, refused},
	{"cas-write", "WRITEs lost to a CAS on the same word", false, casWrite},
	{"cpu-adapter", "increments lost between a processor and the adapter", false, cpuAdapter},
	{"write-order", "WRITEs of 4 KiB whose last word came before their first", false, writeOrder},
}

// Run runs the programs one after the other, each for the given time, or longer until it has
// done a round. A program that fails does not stop the others.
func Run(ctx context.Context, s *Stand, each time.Duration, progress func(done, of int)) []Result {
	var out []Result
	for i, p := range programs {
		if progress != nil {
			progress(i, len(programs))
		}
		start := time.Now()
		r := Result{Name: p.name, Asks: p.asks, Must: p.must}
		err := ctx.Err()
		// A slow device takes all of the time for the lanes: it gets more.
		for within := each; err == nil && r.Rounds == 0 && within <= 64*each; within *= 4 {
			clear(s.Memory.Bytes()[:workBytes])
			r.Rounds, r.Bad, r.Note, err = p.run(ctx, s, time.Now().Add(within))
		}
		if err == nil && p.must && r.Rounds == 0 {
			err = fmt.Errorf("no round was done in %v: give it more time", 64*each)
		}
		if err != nil {
			r.Error = err.Error()
		}
		r.TookMs = time.Since(start).Milliseconds()
		out = append(out, r)
	}
	return out
}

// workBytes is the part of the region that programs use.
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
