package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// One object of a run is a counter that every worker adds to, as fast as it can: workers with an even number by their verbs alone, the
// others by messages to the node where they find it held. Each count that was acknowledged has to be there once.

const (
	opCount     = "count"
	countPrefix = "count:" // of the counter's name in the history
	// counting is how many threads of a worker count, and countPace the mean time between two counts of a thread.
	counting  = 2
	countPace = 500 * time.Microsecond
)

// makeCounter makes the counter and returns its name.
func (w *worker) makeCounter(ctx context.Context) (name string, err error) {
	err = w.insist(ctx, func(ctx context.Context) error {
		e := &event{kind: opBirth, in: "0"}
		return w.do(ctx, e, func(ctx context.Context) ([]byte, error) {
			ref, err := w.c.Alloc(ctx, payload("0", objectBytes), client.AllocOptions{})
			if err == nil {
				e.object = countPrefix + ref.String()
				name = e.object
			}
			return nil, err
		})
	})
	return name, err
}

// setCounter takes a counter's name; false: it is none.
func (w *worker) setCounter(name string) (bool, error) {
	text, ok := strings.CutPrefix(name, countPrefix)
	if !ok {
		return false, nil
	}
	ref, err := proto.ParseRef(text)
	w.counter = ref
	return true, err
}

// count adds to the counter until the context ends.
func (w *worker) count(stop context.Context, thread int) {
	ctx := context.WithoutCancel(stop)
	rng := rand.New(rand.NewPCG(uint64(w.ID), uint64(thread)))
	for stop.Err() == nil {
		err := w.do(ctx, &event{thread: thread, kind: opCount, object: countPrefix + w.counter.String()}, func(ctx context.Context) ([]byte, error) {
			return nil, w.c.Update(ctx, w.counter, countUp)
		})
		var journal *os.PathError
		if errors.As(err, &journal) {
			w.fail(err)
			return
		}
		select {
		case <-stop.Done():
		case <-time.After(time.Duration(rng.Int64N(int64(2 * countPace)))):
		}
	}
}

var errCounter = errors.New("the counter has a payload that no worker writes")

// countUp is one count.
func countUp(old []byte) ([]byte, error) {
	text, ok := valueOf(old)
	n, err := strconv.ParseUint(text, 10, 64)
	if !ok || err != nil {
		return nil, fmt.Errorf("%w: %.40q", errCounter, old)
	}
	return payload(strconv.FormatUint(n+1, 10), objectBytes), nil
}

// readCounter reads the counter in the end.
func (w *worker) readCounter(ctx context.Context) error {
	return w.do(ctx, &event{kind: opRead, object: countPrefix + w.counter.String()}, func(ctx context.Context) ([]byte, error) {
		return w.c.Read(ctx, w.counter, nil)
	})
}

// counter checks the history of a counter: what is read in the end are the counts that were acknowledged, and some of those that are
// unknown.
func (v *verdict) counter(name string, all []*event) {
	done, unknown, last := uint64(0), uint64(0), ""
	for _, e := range all {
		switch {
		case e.kind == opRead:
			last = e.out
		case e.result == okResult:
			done++
		case e.result == unknownResult:
			unknown++
		}
	}
	n, err := strconv.ParseUint(last, 10, 64)
	switch {
	case err != nil:
		v.lost = append(v.lost, name+": it could not be read in the end: "+last)
	case n < done:
		v.lost = append(v.lost, fmt.Sprintf("%s: %d counts were acknowledged, and %d are there", name, done, n))
	case n > done+unknown:
		v.illegal = append(v.illegal, fmt.Sprintf("%s: %d counts are there, and %d were acknowledged and %d unknown", name, n, done, unknown))
	}
}
