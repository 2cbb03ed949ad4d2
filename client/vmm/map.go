package vmm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm/internal/kinds"
	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/internal/uffd"
)

// PageBytes is the unit of mappings, faults and sharing.
const PageBytes = uffd.PageBytes

// Errors.
var (
	// ErrNoPager: no pager serves the socket, and none could be started.
	ErrNoPager = errors.New("no pager serves this host's programs")
	// ErrLost: the mapping is of no use any more, because the pager has ended. Stores behind the latest Sync are lost.
	ErrLost = errors.New("the mapping is lost")
	// ErrMapped: something else is mapped at these addresses of the process.
	ErrMapped = errors.New("the addresses are in use in this process")
	// ErrKernel: the kernel cannot do it.
	ErrKernel = uffd.ErrKernel
)

// Options of Map.
type Options struct {
	// Socket of the pager, which is started if there is none. "": QUARRY_PAGER_SOCKET of the environment, and without it that of this user's pager.
	Socket string
	// Command starts a pager; nil: quarry pager --idle 1m, found by PATH. It has this process's environment, which says by QUARRY_* variables which cluster it serves. An empty Command: none
	// is started.
	Command []string
}

// Mapping is a range of a space in the memory of this process. Its methods are safe for concurrent use; Close is called once.
type Mapping struct {
	link     *pagerlink.Conn
	mem      []byte
	base     uint64
	mode     Mode
	readOnly bool
	userMode bool
	uffd     int
	pagerPID int

	mu      sync.Mutex                // guards what follows
	waiting map[uint64]chan<- replied // requests without a reply, by id
	lastID  uint64
	lost    error // why the pager serves this mapping no more
	closed  bool
	fails   failures
	done    chan struct{} // closed when receive has returned
}

type replied struct {
	r   pagerlink.Reply
	err error
}

// Map maps n bytes of a space, whole pages, at their own address va. The pager must serve the same cluster and tenant as the client of the space; its rights count, and nothing is
// stored in a space that it may only read: then the memory cannot be stored into.
//
// Errors: ErrNoPager; client.ErrArgument for addresses outside of the space, that are not whole pages, or another space's; ErrMapped; ErrKernel.
func Map(ctx context.Context, s *space.Space, va, n uint64, mode Mode, o Options) (*Mapping, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := mode.Check(); err != nil {
		return nil, err
	}
	switch {
	case os.Getpagesize() != PageBytes:
		return nil, fmt.Errorf("%w, with pages of %d bytes: here they have %d", ErrKernel, PageBytes, os.Getpagesize())
	case va%PageBytes != 0 || n%PageBytes != 0 || n == 0 || n > math.MaxInt64:
		return nil, fmt.Errorf("%w: mapping of %d bytes at %#x: want whole pages of %d bytes", client.ErrArgument, n, va, PageBytes)
	case va < s.Base() || n > s.Bytes() || va-s.Base() > s.Bytes()-n:
		return nil, fmt.Errorf("%w: mapping of %d bytes at %#x: space %q has %#x to %#x", space.ErrAddress, n, va, s.Name(), s.Base(), s.Base()+s.Bytes())
	}
	m, err := mapOnce(ctx, s, va, n, mode, o)
	if errors.Is(err, errNoAnswer) { // a pager that was about to end, because it was idle
		m, err = mapOnce(ctx, s, va, n, mode, o)
	}
	if err != nil {
		return nil, fmt.Errorf("mapping space %q: %w", s.Name(), err)
	}
	go m.receive()
	return m, nil
}

// errNoAnswer: the pager has closed the connection.
var errNoAnswer = fmt.Errorf("%w: it does not answer", ErrNoPager)

func mapOnce(ctx context.Context, s *space.Space, va, n uint64, mode Mode, o Options) (*Mapping, error) {
	link, err := connect(ctx, o)
	if err != nil {
		return nil, err
	}
	m := &Mapping{link: link, base: va, mode: mode, waiting: map[uint64]chan<- replied{}, done: make(chan struct{}), uffd: -1}
	stop := context.AfterFunc(ctx, func() { link.SetReadDeadline(time.Unix(1, 0)) })
	err = m.enter(s.Identity(), n)
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		m.leave()
		link.Close()
		return nil, err
	}
	return m, nil
}

// enter asks the pager for the memory, maps it and has the pager serve its faults.
func (m *Mapping) enter(id space.Identity, n uint64) error {
	r, fds, err := m.exchange(pagerlink.Request{Op: pagerlink.OpMap, Version: pagerlink.Version, Space: id.Name, Cluster: id.Cluster, Tenant: id.Tenant,
		Base: id.Base, Region: id.Region, Address: m.base, Bytes: n, Mode: string(m.mode)})
	if err != nil {
		return err
	}
	defer pagerlink.CloseAll(fds)
	if len(fds) != 1 {
		return fmt.Errorf("the pager sent %d descriptors, not the memory", len(fds))
	}
	m.pagerPID, m.readOnly = r.PID, r.ReadOnly
	prot, flags := unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED
	if m.mode == Private {
		flags = unix.MAP_PRIVATE | unix.MAP_NORESERVE
	} else if r.ReadOnly {
		prot = unix.PROT_READ
	}
	if m.uffd, m.userMode, err = uffd.Open(); err != nil {
		return err
	}
	mem, err := uffd.MapAt(fds[0], int64(m.base-id.Base), m.base, n, prot, flags)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: %#x to %#x (another mapping of the space, perhaps: they must not overlap)", ErrMapped, m.base, m.base+n)
	}
	if err != nil {
		return fmt.Errorf("mmap of %d bytes at %#x: %w", n, m.base, err)
	}
	m.mem = mem
	// A child would see pages that are not there as zeros.
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return fmt.Errorf("madvise: %w", err)
	}
	if err := uffd.Register(m.uffd, m.base, n, m.mode != Private); err != nil {
		return fmt.Errorf("userfaultfd: %w", err)
	}
	_, fds, err = m.exchange(pagerlink.Request{Op: pagerlink.OpAttach}, m.uffd)
	pagerlink.CloseAll(fds)
	return err
}

// exchange sends a request and waits for its reply, before receive runs.
func (m *Mapping) exchange(q pagerlink.Request, fds ...int) (r pagerlink.Reply, got []int, err error) {
	if err := m.link.Send(q, fds...); err != nil {
		return r, nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	if got, err = m.link.Receive(&r); err != nil {
		return r, nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	if r.Error != "" {
		pagerlink.CloseAll(got)
		return r, nil, kinds.Error(r.Kind, r.Error)
	}
	return r, got, nil
}

// leave undoes enter.
func (m *Mapping) leave() {
	if m.mem != nil {
		uffd.Unmap(m.mem)
	}
	if m.uffd >= 0 {
		unix.Close(m.uffd)
	}
}

// receive passes replies on until the connection ends.
func (m *Mapping) receive() {
	defer close(m.done)
	for {
		var r pagerlink.Reply
		fds, err := m.link.Receive(&r)
		pagerlink.CloseAll(fds)
		if err != nil {
			m.end(err)
			return
		}
		m.mu.Lock()
		ch := m.waiting[r.ID]
		delete(m.waiting, r.ID)
		m.mu.Unlock()
		if ch != nil {
			ch <- replied{r: r}
		}
	}
}

// end is behind the last message of the pager. Threads that wait for pages, and later accesses, get SIGBUS: an empty file takes the place
// of the memory. The descriptor was kept until now, because without one the kernel would take pages that are missing for zeros.
func (m *Mapping) end(err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		err = errors.New("its connection has ended")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost = fmt.Errorf("%w: the pager, process %d, serves it no more (%w): stores behind the latest Sync may be lost", ErrLost, m.pagerPID, err)
	for id, ch := range m.waiting {
		delete(m.waiting, id)
		ch <- replied{err: m.lost}
	}
	if m.closed {
		return
	}
	empty, err := unix.MemfdCreate("quarry-lost", unix.MFD_CLOEXEC)
	if err == nil {
		defer unix.Close(empty)
		err = uffd.MapOver(empty, m.mem, unix.PROT_READ)
	}
	if err != nil { // the accesses wait for ever
		m.lost = fmt.Errorf("%w (and its memory could not be taken away: %w)", m.lost, err)
		return
	}
	_ = uffd.Wake(m.uffd, m.base, uint64(len(m.mem)))
}

// Bytes is the memory, at the same address as in every other process. It must not be touched after Close.
func (m *Mapping) Bytes() []byte { return m.mem }

// Base is the address of the first byte.
func (m *Mapping) Base() uint64 { return m.base }

// ReadOnly says whether the memory cannot be stored into: the pager may only read the space.
func (m *Mapping) ReadOnly() bool { return m.readOnly && m.mode != Private }

// UserFaultsOnly says whether system calls that are given addresses of pages that are not there fail with EFAULT: this process may not have
// faults of the kernel served. Load a byte of each page before.
func (m *Mapping) UserFaultsOnly() bool { return m.userMode }

// Pager is the process id of the pager.
func (m *Mapping) Pager() int { return m.pagerPID }

// Err says why the mapping is lost, nil while it is not.
func (m *Mapping) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost
}

// Close writes the mapping's dirty pages back, and unmaps it. An error: what Sync says; it is unmapped all the same, and the pager
// goes on trying to write.
func (m *Mapping) Close() error {
	var err error
	if m.mode != Private && !m.readOnly {
		err = m.Sync(context.Background(), m.base, uint64(len(m.mem)))
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return fmt.Errorf("%w: the mapping is closed", client.ErrArgument)
	}
	m.closed = true
	m.mu.Unlock()
	// Unmapped first: the pager takes the end of the connection for the end of all stores.
	m.leave()
	m.link.Close()
	<-m.done
	return err
}

// connect reaches the pager, and starts one if there is none.
func connect(ctx context.Context, o Options) (*pagerlink.Conn, error) {
	socket := cmp.Or(o.Socket, os.Getenv("QUARRY_PAGER_SOCKET"), pagerlink.DefaultSocket())
	link, err := pagerlink.Dial(socket)
	if err == nil {
		return link, nil
	}
	if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w: %w", ErrNoPager, err)
	}
	return start(ctx, socket, o.Command)
}
