package pagerlink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/userdir"
)

// Listener is a pager's socket.
type Listener struct {
	l    *net.UnixListener
	lock *os.File // locked while the socket is served
}

// Listen opens the socket, for this user alone. What a killed pager has left is replaced. It waits for a pager that serves programs no more and still
// writes back. ErrRunning: another one serves the socket, or still writes back after endPatience.
func Listen(ctx context.Context, socket string) (*Listener, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if filepath.Dir(socket) == userdir.Path() {
		if err := userdir.Make(); err != nil {
			return nil, err
		}
	}
	lock, err := os.OpenFile(socket+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("socket of the pager: %w", err)
	}
	if err := takeLock(ctx, lock, socket); err != nil {
		lock.Close()
		return nil, err
	}
	// Only the holder of the lock listens: what is there is of a process that has ended.
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		lock.Close()
		return nil, fmt.Errorf("socket of the pager: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err == nil {
		err = os.Chmod(socket, 0o600)
	}
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("socket of the pager: %w", err)
	}
	return &Listener{l, lock}, nil
}

// endPatience bounds the wait for a pager that ends.
const endPatience = 30 * time.Second

// takeLock locks the file of a socket, when no pager has it locked.
func takeLock(ctx context.Context, lock *os.File, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	for {
		err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%s.lock: %w", socket, err)
		}
		if c, err := Dial(socket); err == nil {
			c.Close()
			return fmt.Errorf("%w %s: one pager serves all programs of a user; another one needs --socket", ErrRunning, socket)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w %s: it ends, and still writes pages back: try again later: %w", ErrRunning, socket, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Accept waits for a program. It refuses those of other users but root.
func (l *Listener) Accept() (*Conn, error) {
	for {
		u, err := l.l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		c := New(u)
		if uid, _, err := c.Peer(); err == nil && (uid == os.Getuid() || uid == 0) {
			return c, nil
		}
		c.Close()
	}
}

// Stop ends Accept and removes the socket's file. Connections go on, and no other pager serves the socket before Close.
func (l *Listener) Stop() { l.l.Close() }

// Close is Stop, and another pager may serve the socket.
func (l *Listener) Close() error {
	l.Stop()
	return l.lock.Close()
}
