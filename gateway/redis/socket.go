package redis

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A client that sends one command at a time waits for each answer, and the gateway then
// waits for the next command. Go's poller adds latency to that wait: a read that finds no
// data, the parking of the goroutine, a thread that sleeps in epoll and another thread that
// looks for work. So the descriptor of a connection that is alone and was just busy is
// taken out of the poller, and a thread blocks in the kernel on it for at most closeWait.
const (
	// closeWait bounds one blocking read. A busy client sends its next command within it,
	// also where other processes delay the client for a few milliseconds.
	closeWait = 10 * time.Millisecond
	// closeReads is how many reads in a row must have ended within closeWait: taking a
	// descriptor out of the poller and putting it back cost some ten system calls.
	closeReads = 32
	// yieldAfter is how long a connection runs before it yields. After 10 ms the scheduler
	// would preempt its goroutine by a signal, and then check it every 20 us for a while.
	yieldAfter = 4 * time.Millisecond
)

// maxClose bounds the threads in such a read.
func maxClose() int32 { return int32(max(1, runtime.GOMAXPROCS(0)/2)) }

// socket is what a connection reads from and writes to. All but nc belongs to its
// goroutine.
type socket struct {
	s   *Server
	nc  net.Conn        // s.mu, for all but reading it in the own goroutine
	raw syscall.RawConn // of nc; nil: it has no descriptor
	own int             // a descriptor that Go does not know of, instead of nc; -1: none

	// Of the call in hand.
	b             []byte
	n             int
	err           error
	reads, writes func(fd uintptr) bool // bound once
}

func (k *socket) init(s *Server, nc net.Conn) {
	k.s, k.own = s, -1
	k.reads, k.writes = k.tryRead, k.tryWrite
	k.use(nc)
}

func (k *socket) use(nc net.Conn) {
	k.nc, k.raw = nc, nil
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			k.raw = raw
		}
	}
}

// read waits for input. busy says that it is worth a thread.
func (k *socket) read(b []byte, busy bool) (int, error) {
	switch {
	case k.own < 0 && busy:
		k.detach()
	case k.own >= 0 && !busy:
		if err := k.attach(); err != nil {
			return 0, err
		}
	}
	for k.own >= 0 {
		n, err := unix.Read(k.own, b)
		switch {
		case err == nil && n == 0:
			return 0, io.EOF
		case err == nil:
			return n, nil
		case err == unix.EAGAIN:
			err = k.attach()
		}
		if err != nil && err != unix.EINTR {
			return 0, err
		}
	}
	if k.raw == nil {
		return k.nc.Read(b)
	}
	return k.through(k.raw.Read, k.reads, b)
}

// write sends all of b, or gives up when a slow reader has had his time.
func (k *socket) write(b []byte) (n int, err error) {
	for k.own >= 0 && n < len(b) {
		m, err := unix.Write(k.own, b[n:])
		n += max(m, 0)
		if err == unix.EAGAIN {
			err = k.attach()
		}
		if err != nil && err != unix.EINTR {
			return n, err
		}
	}
	if n == len(b) {
		return n, nil
	}
	var m int
	if k.raw == nil {
		m, err = k.nc.Write(b[n:])
	} else {
		m, err = k.through(k.raw.Write, k.writes, b[n:])
	}
	return n + m, err
}

// through makes one call by way of Go's poller.
func (k *socket) through(call func(func(fd uintptr) bool) error, f func(fd uintptr) bool, b []byte) (int, error) {
	k.b, k.n, k.err = b, 0, nil
	err := call(f)
	k.b = nil
	return k.n, errors.Join(err, k.err)
}

// tryRead says whether there is an answer: bytes, the end, or an error.
func (k *socket) tryRead(fd uintptr) bool {
	for k.n < len(k.b) {
		switch n, e := rawRead(fd, k.b[k.n:]); {
		case e == syscall.EINTR:
		case e == syscall.EAGAIN:
			return k.n > 0
		case e != 0:
			k.err = e
			return true
		case n == 0:
			k.err = io.EOF
			return true
		default:
			if k.n += n; n < rawBytes {
				return true
			}
		}
	}
	return true
}

func (k *socket) tryWrite(fd uintptr) bool {
	for k.n < len(k.b) {
		switch n, e := rawWrite(fd, k.b[k.n:]); e {
		case 0:
			k.n += n
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		default:
			k.err = e
			return true
		}
	}
	return true
}

// detach takes the connection out of Go's poller, if there is a thread for it. What
// fails leaves it where it is.
func (k *socket) detach() {
	if k.raw == nil {
		return
	}
	if k.s.close.Add(1) > k.s.maxClose {
		k.s.close.Add(-1)
		return
	}
	own, wait := -1, unix.NsecToTimeval(int64(closeWait))
	_ = k.raw.Control(func(fd uintptr) {
		if n, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			own = n
		}
	})
	if own < 0 || unix.SetsockoptTimeval(own, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait) != nil ||
		unix.SetsockoptTimeval(own, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait) != nil {
		unix.Close(own)
		k.s.close.Add(-1)
		return
	}
	k.nc.Close() // its descriptor; the connection goes on
	_ = unix.SetNonblock(own, false)
	k.own = own
}

// attach brings it back.
func (k *socket) attach() error {
	f := os.NewFile(uintptr(k.own), "")
	nc, err := net.FileConn(f)
	f.Close()
	k.own = -1
	k.s.close.Add(-1)
	if err != nil {
		return err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	k.use(nc)
	if k.s.ending.Load() {
		k.end()
		return nil
	}
	return nc.SetWriteDeadline(time.Now().Add(k.s.patience))
}

// end makes waiting for a command end; answers have to be read soon.
// Preconditions: s.mu held, s.ending set.
func (k *socket) end() {
	_ = k.nc.SetReadDeadline(time.Unix(1, 0))
	_ = k.nc.SetWriteDeadline(time.Now().Add(lastWords))
}

func (k *socket) close() {
	if k.own >= 0 {
		unix.Close(k.own)
		k.own = -1
		k.s.close.Add(-1)
	}
	k.nc.Close()
}

// came notes how long a client let us wait, and what company it has: how many
// connections have sent something in this slice of time.
func (c *conn) came(waited time.Duration) {
	if waited > closeWait {
		c.quick = 0
	} else if c.quick < closeReads {
		c.quick++
	}
	if c.sock.own >= 0 && c.began.Sub(c.yielded) > yieldAfter {
		c.yielded = c.began
		runtime.Gosched()
	}
	slice := c.began.UnixNano() / int64(closeWait)
	if c.slice == slice {
		return
	}
	c.slice = slice
	if s := c.s; s.slice.Swap(slice) != slice {
		s.before.Store(s.company.Swap(1))
	} else {
		s.company.Add(1)
	}
}

// alone says whether the client is busy, and no more are than there are threads to
// wait for each.
func (c *conn) alone() bool {
	if max(c.s.company.Load(), c.s.before.Load()) > c.s.maxClose {
		c.quick = 0
	}
	return c.quick >= closeReads
}
