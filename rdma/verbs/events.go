//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"fmt"
	"maps"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// events follows what a device says by itself: ports that go down, errors of queues, its
// own failure.
type events struct {
	device *device                            // whose events
	file   *os.File                           // a copy of the context's descriptor, for the poller
	ended  chan struct{}                      // closed when the goroutine that reads events has ended
	closed atomic.Bool                        // close was called
	heard  func(event string, kind eventKind) // called by the reader for each event

	mu     sync.Mutex        // guards counts
	counts map[string]uint64 // by the library's name of the event
}

// eventKind is what an event means for users of the device.
type eventKind uint8

const (
	eventTold  eventKind = iota // nothing to be done
	eventBad                    // a port, address or queue pair that does not work now
	eventQueue                  // a completion queue is lost
	eventFatal                  // nothing that was opened on the device works any more
)

// kindOf sorts an asynchronous event by what has to be done about it.
func kindOf(event C.int) eventKind {
	switch event {
	case C.IBV_EVENT_PORT_ACTIVE, C.IBV_EVENT_COMM_EST:
		return eventTold
	case C.IBV_EVENT_CQ_ERR:
		return eventQueue
	case C.IBV_EVENT_DEVICE_FATAL:
		return eventFatal
	}
	return eventBad
}

// follow calls heard for each event.
func (d *device) follow(heard func(event string, kind eventKind)) (*events, error) {
	fd, err := unix.FcntlInt(uintptr(d.ctx.async_fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("asynchronous events of %s: %w", d.caps.Device, err)
	}
	e := &events{device: d, file: os.NewFile(uintptr(fd), "uverbs"), ended: make(chan struct{}), heard: heard, counts: make(map[string]uint64)}
	go e.read()
	return e, nil
}

// read reads the device's events until close.
func (e *events) read() {
	defer close(e.ended)
	raw, err := e.file.SyscallConn()
	if err != nil {
		return
	}
	for {
		kind := C.int(0)
		err := raw.Read(func(uintptr) bool {
			kind = C.q_async(e.device.ctx)
			return kind != -C.int(unix.EAGAIN)
		})
		switch {
		case e.closed.Load():
			return
		case err != nil || kind < 0 && kind != -C.int(unix.EINTR):
			e.heard(fmt.Sprintf("asynchronous events end (%v, %v)", err, unix.Errno(-kind)), eventFatal)
			return
		case kind < 0:
			continue
		}
		name := C.GoString(C.ibv_event_type_str(C.enum_ibv_event_type(kind)))
		e.mu.Lock()
		e.counts[name]++
		e.mu.Unlock()
		e.heard(name, kindOf(kind))
	}
}

// snapshot counts the events so far, by their names.
func (e *events) snapshot() map[string]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.counts)
}

// close ends read, and waits for its end.
func (e *events) close() {
	e.closed.Store(true)
	e.file.Close()
	<-e.ended
}
