package resp

import (
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Who asks one thing after the other waits for us, and we for him. Parking the
// goroutine costs a read that finds nothing and a walk through the scheduler; a
// thread that waits in the kernel itself is back sooner. So a few connections that
// have just been busy do that, for a little while.
const (
	// closeWait is how long: the time in which a busy client comes back.
	closeWait = 2 * time.Millisecond
	// closeReads is how many times in a row a client must have come back in time.
	closeReads = 4
)

// maxClose bounds the threads that wait so.
func maxClose() int32 { return int32(max(1, runtime.GOMAXPROCS(0)/2)) }

// linger waits a little for more input, without the scheduler.
func (c *conn) linger() {
	if c.sys == nil || c.quick < closeReads {
		return
	}
	if c.s.close.Add(1) > c.s.maxClose {
		c.s.close.Add(-1)
		return
	}
	_ = c.sys.Control(func(fd uintptr) {
		fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		_, _ = unix.Poll(fds[:], int(closeWait/time.Millisecond))
	})
	c.s.close.Add(-1)
}

// came notes how long a client let us wait.
func (c *conn) came(waited time.Duration) {
	if waited > closeWait {
		c.quick = 0
	} else if c.quick < closeReads {
		c.quick++
	}
}

// system is the way to a connection's descriptor, nil if it has none.
func system(nc any) syscall.RawConn {
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			return raw
		}
	}
	return nil
}
