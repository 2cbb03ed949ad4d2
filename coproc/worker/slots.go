package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Slots runs each slot of a worker as a process of this program, with the same arguments. A slot is a worker of jobs with a session and a
// record of its own: what it may change is fenced as that of any worker is, and when it ends nothing else does.
type Slots struct {
	Name    string        // of the worker; default host and process
	Count   int           // of slots
	Memory  int           // live memory of each slot in bytes, above which it gives up its part
	Metrics string        // address of the first slot's metrics; "": none
	Drain   time.Duration // parts that run have so long to end when the worker is to end
	Err     io.Writer     // standard error of the slots
	Logger  *slog.Logger

	cg     *cgroups // nil: there is none, and the worker watches the memory of the slots
	places *os.File // see Slot.Take
}

const (
	// restartMin and restartMax are how long a slot that has ended is waited for. One that was ready is waited for no longer than restartReady, less
	// than a lease: the next one records how it has ended before others take its part over.
	restartMin   = 100 * time.Millisecond
	restartMax   = 10 * time.Second
	restartReady = 2 * time.Second
	// killAfter is how long a slot has, after Drain, to end its parts and to sign off.
	killAfter = 5 * time.Second
	// maxBefore is of how many processes of a slot the next one knows how they have ended: their parts wait for the fence of their sessions while
	// others follow them.
	maxBefore = 16
)

// Run runs the slots until ctx ends. Then each has Drain to end its part. ready is called when all of them accept parts, with the
// addresses of their metrics. The error is that of a slot that ends before it was ever ready. The slots end with this process, however it ends.
func (s Slots) Run(ctx context.Context, ready func(metrics []string) error) error {
	if s.Name == "" {
		host, _ := os.Hostname()
		s.Name = fmt.Sprintf("%s.%d", host, os.Getpid())
	}
	for n := range s.Count { // before anything is begun
		if _, err := portOf(s.Metrics, n+1); err != nil {
			return err
		}
	}
	fd, err := unix.MemfdCreate("quarry-places", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("worker: memfd: %w", err)
	}
	s.places = os.NewFile(uintptr(fd), "places")
	defer s.places.Close()
	var why error
	if s.cg, why = newCgroups(); s.cg != nil {
		defer s.cg.close()
		s.Logger.Info("each slot is a process, limited by its cgroup", "slots", s.Count, "memory_mib", hardLimit(s.Memory)>>20, "cgroup", s.cg.dir, "threads", slotPids)
	} else {
		s.Logger.Info("each slot is a process whose memory the worker watches; its threads and its share of processors have no limit", "slots", s.Count, "memory_mib", hardLimit(s.Memory)>>20, "cgroup", why)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	begun := make(chan string, s.Count)
	for n := range s.Count {
		wg.Go(func() {
			if err := s.keep(ctx, n+1, begun); err != nil {
				stop(err)
			}
		})
	}
	err = s.await(ctx, begun, ready)
	if err != nil {
		stop(err)
	}
	wg.Wait()
	return err
}

// SlotError is why a worker ends by itself: a slot of it was never ready.
type SlotError struct {
	Slot, How string // its name, and how its process has ended
	Code      int    // exit code of the process; -1 if there was none, or a signal has ended it
}

func (e *SlotError) Error() string {
	return fmt.Sprintf("slot %s has ended before it was ready: %s", e.Slot, e.How)
}

// await calls ready when all slots are, and returns when ctx has ended.
func (s *Slots) await(ctx context.Context, begun <-chan string, ready func([]string) error) error {
	var metrics []string
	for range s.Count {
		select {
		case at := <-begun:
			metrics = append(metrics, at)
			continue
		case <-ctx.Done():
		}
		if slot := (*SlotError)(nil); errors.As(context.Cause(ctx), &slot) {
			return slot
		}
		return nil
	}
	if err := ready(metrics); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// keep runs one slot until ctx ends, and starts it again when it ends, each time after a longer pause; one that has lived for a minute begins with
// the shortest anew. The error is of one that was never ready.
func (s *Slots) keep(ctx context.Context, n int, begun chan<- string) error {
	pause, ever := restartMin, false
	slot := Slot{Number: n, Name: s.named(n), Before: map[uint64]string{}, Parent: os.Getpid(), Memory: int64(s.Memory)}
	var lives []uint64 // of those that were ready, in their order
	for {
		began := time.Now()
		slot.Life = rand.Uint64() | 1
		said, how, code := s.once(ctx, slot, begun)
		switch {
		case ctx.Err() != nil:
			if code != 0 {
				s.Logger.Warn("slot has ended before it has signed off", "slot", slot.Name, "reason", how)
			}
			return nil
		case !said && !ever:
			return &SlotError{slot.Name, how, code}
		case said:
			ever, begun = true, nil
			lives, slot.Before[slot.Life] = append(lives, slot.Life), how
			if len(lives) > maxBefore {
				delete(slot.Before, lives[0])
				lives = lives[1:]
			}
		}
		if time.Since(began) > time.Minute {
			pause = restartMin
		}
		s.Logger.Warn("slot has ended and is started again", "slot", slot.Name, "reason", how, "after", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if pause = min(2*pause, restartMax); said {
			pause = min(pause, restartReady)
		}
	}
}

// named is the name of a slot as a worker of jobs.
func (s *Slots) named(n int) string { return fmt.Sprintf("%s/%d", s.Name, n) }
