package host

import (
	"fmt"
	"os"
	"sync"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

// Process is a client process on this host, held by a pidfd: its number cannot be
// given to another while we look.
type Process struct {
	Pid int    // in this process's pid namespace
	Uid uint32 // effective user when it connected

	mu     sync.Mutex // guards what follows
	fd     int        // -1 once closed
	dead   bool       // seen to have ended; final
	killed bool       // Kill has sent the signal
}

// PeerProcess is the process at the other end of a unix socket. It is refused with
// rdma.ErrProcess unless this process may look into it and kill it: otherwise the end of its
// session could not be enforced.
func PeerProcess(socket int) (*Process, error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("credentials of the shm client: %w", err)
	}
	pid := int(cred.Pid)
	if pid == 0 {
		return nil, fmt.Errorf("%w: it is not in this node's pid namespace", rdma.ErrProcess)
	}
	fd, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err != nil { // before Linux 6.5
		fd, err = unix.PidfdOpen(pid, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd of shm client %d: %w", pid, err)
	}
	unix.CloseOnExec(fd)
	p := &Process{Pid: pid, Uid: cred.Uid, fd: fd}
	err = unix.PidfdSendSignal(fd, 0, nil, 0)
	if err == nil && !p.Own() {
		_, _, err = (&sight{}).look(pid, true)
	}
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("process %d of user %d: %w (%w)", pid, cred.Uid, rdma.ErrProcess, err)
	}
	return p, nil
}

// dup is the same process, to be closed on its own.
func (p *Process) dup() (*Process, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fd, err := unix.FcntlInt(uintptr(p.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd of shm client %d: %w", p.Pid, err)
	}
	return &Process{Pid: p.Pid, Uid: p.Uid, fd: fd, dead: p.dead}, nil
}

// Own says whether it is this very process, which is never killed.
func (p *Process) Own() bool { return p.Pid == os.Getpid() }

// Opens says whether the process could open what this node has opened: it is run by the same user, or by root.
func (p *Process) Opens() bool { return p.Uid == 0 || p.Uid == uint32(os.Geteuid()) }

// Reopens says whether the process could open memory of this node for writing, which it was sent for
// reading: /proc/self/fd lets root and the owner do so.
func (p *Process) Reopens() bool { return !p.Own() && (p.Uid == 0 || int(p.Uid) == os.Geteuid()) }

// Dead says whether the process has ended: no thread of it runs any more. A Process that
// was closed counts as dead.
func (p *Process) Dead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead && p.fd >= 0 {
		polled := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(polled, 0)
		p.dead = err == nil && n == 1 && polled[0].Revents&unix.POLLIN != 0
	}
	return p.dead || p.fd < 0
}

// Kill ends the process without asking it; first says that this call was the first. It is
// over when Dead says so.
func (p *Process) Kill() (first bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fd < 0 {
		return false, unix.ESRCH
	}
	if err := unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0); err != nil {
		return false, err
	}
	first, p.killed = !p.killed, true
	return first, nil
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
