package pagerlink

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// soPeerPIDFD is SO_PEERPIDFD, of Linux 6.5.
const soPeerPIDFD = 77

// WaitOwner waits until the process that has made the connection has ended, nil, or the context. The connection itself may go on then: a child that the process
// has forked, and that executes no other program, keeps a descriptor of it.
func (c *Conn) WaitOwner(ctx context.Context) error {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return err
	}
	pidfd := -1
	var perr error
	if err := raw.Control(func(fd uintptr) { pidfd, perr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPIDFD) }); err != nil {
		return err
	}
	if errors.Is(perr, unix.ESRCH) || errors.Is(perr, unix.EINVAL) || errors.Is(perr, unix.ENODATA) {
		return nil // it has ended, and its parent knows
	}
	if perr != nil {
		return fmt.Errorf("the process at the other end: %w", perr)
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return err
	}
	f := os.NewFile(uintptr(pidfd), "pidfd")
	defer f.Close()
	defer context.AfterFunc(ctx, func() { f.Close() })()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	err = conn.Read(func(fd uintptr) bool { // without a thread that waits
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n > 0
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
