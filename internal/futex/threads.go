package futex

import (
	"runtime"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

const (
	// maxThreads bounds the threads of a process that sleep at a time.
	maxThreads = 64
	// handover is how long the scheduler may keep a processor for a thread that sleeps: sysmon takes it back after 10 ms, in twice that time if it
	// looks as seldom as it may.
	handover = 20 * time.Millisecond
)

// threads counts the sleeps of this process.
var threads count

// count bounds sleeps.
type count struct {
	mu    sync.Mutex        // guards begun
	begun [maxThreads]int64 // when the sleep of each place began, in clock.Now time; 0: the place is free
}

// Thread is the right to sleep, from Take to Give.
type Thread struct {
	of    *count
	place int
}

// Take allows the caller to sleep in its thread, once; false: too many threads do.
func Take() (Thread, bool) { return threads.take(clock.Now(), runtime.GOMAXPROCS(0)) }

// take is Take on a machine with so many processors.
func (c *count) take(now int64, processors int) (Thread, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	young, free := 1, -1
	for i, at := range c.begun {
		switch {
		case at == 0:
			free = i
		case now-at < int64(handover):
			young++
		}
	}
	if free < 0 || young >= processors {
		return Thread{}, false
	}
	c.begun[free] = max(now, 1)
	return Thread{of: c, place: free}, true
}

// Give gives the right back.
func (t Thread) Give() {
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	t.of.begun[t.place] = 0
}
