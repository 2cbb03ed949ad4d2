package redis

import (
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
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

// socket reads and writes a connection's bytes. It is in one of two states: attached, where
// reads wait in Go's poller, or detached, where a thread blocks in the kernel. All fields but nc
// belong to the connection's goroutine.
type socket struct {
	s *Server
	// nc is the connection while attached; closed while detached. The owner writes it under
	// s.mu and reads it without; others read it under s.mu.
	nc  net.Conn
	raw syscall.RawConn // of nc; nil: nc has no descriptor, and is never detached
	// own is the blocking descriptor while detached; -1: attached.
	// Invariant: own >= 0 exactly while this connection counts in s.close.
	own int
	// killed ends the connection as soon as its goroutine looks. Set before nc is closed.
	killed atomic.Bool
	// way is held while the state changes, and by others than the owner while they write.
	way      sync.Mutex
	attached func() // called when the socket is attached again

	// Arguments and results of the present call of tryRead or tryWrite.
	b             []byte                // to fill, or to send
	n             int                   // bytes of b that are done
	err           error                 // of the system call
	reads, writes func(fd uintptr) bool // tryRead and tryWrite, bound once: no allocation per call
}

// init makes a socket, attached, of a connection.
func (k *socket) init(s *Server, nc net.Conn) {
	k.s, k.own = s, -1
	k.reads, k.writes = k.tryRead, k.tryWrite
	k.use(nc)
}

// use makes nc the connection. Preconditions: s.mu held, or the goroutine has not begun.
func (k *socket) use(nc net.Conn) {
	k.nc, k.raw = nc, nil
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			k.raw = raw
		}
	}
}

// read waits for input and reads at least one byte, or returns an error: io.EOF when the client
// has closed. busy detaches the socket, if a thread is free for it; otherwise it is attached.
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

// write sends all of b. It fails when the client has not read for the write deadline. n is how much
// was sent.
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

// through makes one call by way of Go's poller, which repeats f until it returns true.
func (k *socket) through(call func(func(fd uintptr) bool) error, f func(fd uintptr) bool, b []byte) (int, error) {
	k.b, k.n, k.err = b, 0, nil
	err := call(f)
	k.b = nil
	return k.n, errors.Join(err, k.err)
}

// tryRead fills k.b with what has come. False: nothing has, and the poller must wait.
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

// tryWrite sends k.b. False: the socket's buffer is full, and the poller must wait.
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

// detach takes the connection out of Go's poller: it duplicates the descriptor, makes it block
// for at most closeWait, and closes nc. If maxClose threads block already, or a system call
// fails, the socket stays attached.
func (k *socket) detach() {
	k.way.Lock()
	defer k.way.Unlock()
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
	k.nc.Close() // its descriptor alone: the duplicate keeps the connection open
	_ = unix.SetNonblock(own, false)
	k.own = own
}

// attach ends detach: a new net.Conn takes the descriptor. After an error the socket is unusable.
func (k *socket) attach() error {
	k.way.Lock()
	defer func() {
		k.way.Unlock()
		k.attached()
	}()
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
	if k.killed.Load() {
		nc.Close()
		return net.ErrClosed
	}
	if k.s.ending.Load() {
		k.end()
		return nil
	}
	return nc.SetWriteDeadline(time.Now().Add(k.s.patience))
}

// end makes a read that waits for a command fail, and leaves lastWords for the replies to be read.
// Preconditions: s.mu held, s.ending set.
func (k *socket) end() {
	_ = k.nc.SetReadDeadline(time.Unix(1, 0))
	_ = k.nc.SetWriteDeadline(time.Now().Add(lastWords))
}

// close ends the connection, in either state.
func (k *socket) close() {
	if k.own >= 0 {
		k.way.Lock() // for a moment: nobody writes while the socket is detached
		unix.Close(k.own)
		k.own = -1
		k.way.Unlock()
		k.s.close.Add(-1)
	}
	hangUp(k.nc)
}

// came records that a batch has come after waited. It counts the connections that send something
// in a slice of closeWait (s.company; s.before: of the slice before), for alone.
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

// alone says whether a thread may block on this connection: its client has sent closeReads
// batches in quick succession, and there are no more active connections than such threads. A
// connection without the password stays attached, so that it can be closed.
func (c *conn) alone() bool {
	if max(c.s.company.Load(), c.s.before.Load()) > c.s.maxClose {
		c.quick = 0
	}
	return c.quick >= closeReads && c.authenticated && !c.pushes.used.Load()
}
