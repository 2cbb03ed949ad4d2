//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"golang.org/x/sys/unix"
)

// sleeper parks a goroutine in the runtime's poller until its lane's completion queue,
// socket or connection manager has something to say. A wait in C would hold a thread of the
// operating system for as long.
type sleeper struct {
	lane *C.q_lane          // whose queue is polled
	file *os.File           // an epoll instance over the three
	raw  syscall.RawConn    // of file, whose Read parks the goroutine
	poll func(uintptr) bool // made once, since a closure for each wait would be an allocation
	seq  C.uint64_t         // awaited
	how  C.int              // the outcome of poll
}

// maxNap bounds one sleep; a wake-up that a device has lost costs no more.
const maxNap = time.Second

// newSleeper watches a lane that is connected.
func newSleeper(l *C.q_lane) (*sleeper, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	for on, at := range map[int32]C.int{C.Q_ON_CHANNEL: l.channel.fd, C.Q_ON_SOCKET: l.socket, C.Q_ON_EVENTS: l.events.fd} {
		if err := unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, int(at), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: on}); err != nil {
			return nil, errors.Join(fmt.Errorf("epoll: %w", err), unix.Close(fd))
		}
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("epoll: %w", err), unix.Close(fd))
	}
	s := &sleeper{lane: l, file: os.NewFile(uintptr(fd), "lane")}
	s.poll = func(uintptr) bool {
		s.how = C.q_poll(s.lane, s.seq)
		return s.how != C.Q_PENDING
	}
	l.epoll = C.int(fd)
	if s.raw, err = s.file.SyscallConn(); err == nil {
		err = s.file.SetReadDeadline(time.Time{}) // the poller has it, or says that it cannot
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("polling a lane: %w", err), s.file.Close())
	}
	return s, nil
}

// wait sleeps until the lane's work request of a sequence has an outcome, at most limit ns.
func (s *sleeper) wait(sequence C.uint64_t, limit int64) C.int {
	s.seq, s.how = sequence, C.Q_PENDING
	start := clock.Now()
	for {
		left := limit - (clock.Now() - start)
		if left <= 0 {
			return C.Q_TIMEOUT
		}
		if err := s.file.SetReadDeadline(time.Now().Add(min(maxNap, time.Duration(left)))); err != nil {
			return C.Q_SYSTEM
		}
		err := s.raw.Read(s.poll)
		switch {
		case s.how != C.Q_PENDING:
			return s.how
		case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			return C.Q_SYSTEM
		}
	}
}

// close frees the epoll instance.
// Preconditions: nothing waits on it.
func (s *sleeper) close() {
	s.lane.epoll = -1
	s.file.Close()
}

// timedOut is the outcome of a wait that nothing has ended.
const timedOut = C.Q_TIMEOUT
