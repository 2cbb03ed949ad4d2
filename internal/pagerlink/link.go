package pagerlink

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/userdir"
)

// Version of the messages. A pager refuses others.
const Version = 1

// maxMessage is the longest message; maxFiles the most descriptors that come with one.
const (
	maxMessage = 8 << 10
	maxFiles   = 2
)

// MaxCalls is how many requests of one connection the pager works on at the same time. It reads no further ones meanwhile.
const MaxCalls = 16

// Operations.
const (
	OpMap      = "map"
	OpAttach   = "attach"
	OpSync     = "sync"
	OpAcquire  = "acquire"
	OpPrefetch = "prefetch"
	OpWhy      = "why"
)

// Request is a message to the pager.
type Request struct {
	ID      uint64   `json:"id"`
	Op      string   `json:"op"`
	Address uint64   `json:"address,omitempty"`
	Bytes   uint64   `json:"bytes,omitempty"`
	Version int      `json:"version,omitempty"` // of a map request, and what follows
	Space   string   `json:"space,omitempty"`
	Cluster [16]byte `json:"cluster,omitzero"`
	Tenant  uint32   `json:"tenant,omitempty"`
	Base    uint64   `json:"base,omitempty"`
	Region  uint32   `json:"region,omitempty"` // number of the space's first region
	Mode    string   `json:"mode,omitempty"`
}

// Reply is a message of the pager.
type Reply struct {
	ID       uint64 `json:"id"`
	Error    string `json:"error,omitempty"` // "" where it is done
	Kind     string `json:"kind,omitempty"`  // of the error; see Kinds in package vmm
	PID      int    `json:"pid,omitempty"`   // of the pager
	ReadOnly bool   `json:"read_only,omitempty"`
	Dropped  uint64 `json:"dropped,omitempty"` // pages that an acquire has dropped
}

// ErrRunning: another pager serves the socket.
var ErrRunning = errors.New("another pager of this user serves the socket")

// DefaultSocket is where the pager of this user listens.
func DefaultSocket() string { return filepath.Join(userdir.Path(), "pager.sock") }

// Conn is one end of a connection. Any goroutine may send; one receives.
type Conn struct {
	c  *net.UnixConn
	mu sync.Mutex // one message is written at a time
}

// New makes a Conn of a SOCK_SEQPACKET socket.
func New(c *net.UnixConn) *Conn { return &Conn{c: c} }

// Dial connects to a pager.
func Dial(socket string) (*Conn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	return New(c), nil
}

// Pair makes two connected ends; the second is for a child process.
func Pair() (*Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	other := os.NewFile(uintptr(fds[1]), "pair")
	c, err := FromFile(os.NewFile(uintptr(fds[0]), "pair"))
	if err != nil {
		other.Close()
		return nil, nil, err
	}
	return c, other, nil
}

// FromFile makes a Conn of a socket's descriptor, which it closes.
func FromFile(f *os.File) (*Conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("not a unix socket")
	}
	return New(u), nil
}

// Send writes one message with descriptors, which stay open.
func (c *Conn) Send(v any, fds ...int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > maxMessage || len(fds) > maxFiles {
		return fmt.Errorf("a message of %d bytes and %d descriptors: at most %d and %d", len(b), len(fds), maxMessage, maxFiles)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _, err = c.c.WriteMsgUnix(b, rights, nil)
	return err
}

// Receive reads one message into v, and the descriptors that came with it, which are the caller's. io.EOF or net.ErrClosed: the connection
// has ended. The descriptors are no os.Files, whose method Fd makes them block, at the other end too.
func (c *Conn) Receive(v any) (fds []int, _ error) {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := c.c.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, err
	}
	fds = received(oob[:oobn])
	switch {
	case n == 0:
		err = net.ErrClosed
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("a message on the pager's socket is too long")
	default:
		err = json.Unmarshal(buf[:n], v)
	}
	if err != nil {
		CloseAll(fds)
		return nil, err
	}
	return fds, nil
}

// received are the descriptors of a message.
func received(oob []byte) (fds []int) {
	if len(oob) == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	return fds
}

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// Peer is the user and the process at the other end.
func (c *Conn) Peer() (uid, pid int, err error) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, 0, err
	}
	if cerr != nil {
		return 0, 0, cerr
	}
	return int(cred.Uid), int(cred.Pid), nil
}

// SetReadDeadline bounds Receive; the zero time: no bound.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.c.SetReadDeadline(t) }

// SetWriteDeadline bounds Send, which waits for an end that does not receive.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.c.SetWriteDeadline(t) }

// Close ends the connection at both ends.
func (c *Conn) Close() error { return c.c.Close() }
