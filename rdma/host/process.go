package host

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Process is a client process on this host, held by a pidfd: its number cannot be
// given to another while we look.
type Process struct {
	Pid int
	Uid uint32

	mu   sync.Mutex
	fd   int // -1 once closed
	dead bool
}

// PeerProcess is the process that connected a unix socket. It fails unless this
// process has the right to kill it: without it a stopped client could not be fenced.
func PeerProcess(socket int) (*Process, error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("credentials of the shm client: %w", err)
	}
	pid := int(cred.Pid)
	fd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err != nil { // before Linux 6.5
		fd, err = unix.PidfdOpen(pid, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd of shm client %d: %w", pid, err)
	}
	unix.CloseOnExec(fd)
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shm client %d cannot be fenced, no right to kill it (%w): run both as one user, or use tcp", pid, err)
	}
	return &Process{Pid: pid, Uid: cred.Uid, fd: fd}, nil
}

// Own says whether it is this very process, which is never killed.
func (p *Process) Own() bool { return p.Pid == os.Getpid() }

// Reopens says whether the process could open memory of this node for writing, which it was sent for
// reading: /proc/self/fd lets root and the owner do so.
func (p *Process) Reopens() bool { return !p.Own() && (p.Uid == 0 || int(p.Uid) == os.Geteuid()) }

// Dead says whether the process has ended: no thread of it runs any more.
func (p *Process) Dead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead && p.fd >= 0 {
		polled := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(polled, 0)
		p.dead = err == nil && n == 1 && polled[0].Revents&unix.POLLIN != 0
	}
	return p.dead
}

// Kill ends the process without asking it. It is over when Dead says so.
func (p *Process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fd < 0 {
		return unix.ESRCH
	}
	return unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
}

// Close gives the pidfd back.
func (p *Process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	fd := p.fd
	p.fd = -1
	if fd < 0 {
		return nil
	}
	return unix.Close(fd)
}
