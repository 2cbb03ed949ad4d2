package pager

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/internal/uffd"
)

// mapping is a range of a space that a program has mapped.
type mapping struct {
	of       *memory
	link     *pagerlink.Conn
	first, n uint64 // pages
	pid      int    // of the program
	shared   bool   // its stores are the space's

	use    sync.RWMutex // held for reading while uffd is used
	uffd   int          // -1 before attach and behind detach
	events *os.File     // of the same userfaultfd, for reading

	tasks sync.WaitGroup // what works on the memory for this mapping
	// See serve.go.
	reader  atomic.Uint64 // the number of the goroutine that reads faults
	served  atomic.Uint64 // 1 + the number of the reader that serves a fault by itself, 0: it reads
	faults  atomic.Uint64 // that readers have begun to serve by themselves
	slow    atomic.Bool   // the latest fault was not quick
	servers atomic.Int32  // of faults
	resting atomic.Bool   // the watch waits for watch
	watch   chan struct{}
	stop    chan struct{} // closed when faults are served no more

	mu      sync.Mutex       // guards what follows
	ahead   sequence         // of its faults
	reasons map[uint64]error // for which pages were poisoned
	// Pages of a private mapping that are poisoned until the program has asked why. They are not mapped before: the program takes the poison away by removing the
	// page, which may have a store by then.
	poisoned map[uint64]bool
}

// errGone: the program has ended, or has unmapped the mapping.
var errGone = errors.New("the mapping is gone")

// errStored: the first page of several is mapped, and the program may have stored into it; the others have no memory.
var errStored = errors.New("no memory for the pages behind one that is stored into")

// maxReasons bounds the reasons that are kept for a program, maxPoisoned the pages.
const (
	maxReasons  = 64
	maxPoisoned = 1 << 16
)

// attach takes over a program's userfaultfd.
func (m *mapping) attach(fd int) error {
	if !uffd.Is(fd) {
		return fmt.Errorf("%w: the descriptor to attach is no userfaultfd", client.ErrArgument)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("userfaultfd: %w", err)
	}
	// A second descriptor: an os.File may not be asked for its own without being made to block.
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("userfaultfd: %w", err)
	}
	m.use.Lock()
	m.uffd, m.events = fd, os.NewFile(uintptr(dup), "userfaultfd")
	m.use.Unlock()
	m.of.mu.Lock()
	m.of.mappings[m] = true
	m.of.mu.Unlock()
	return nil
}

// stopFaults ends the serving of faults.
func (m *mapping) stopFaults() {
	m.events.Close()
	close(m.stop)
	m.tasks.Wait()
}

// detach gives the userfaultfd up, when faults are not served any more.
func (m *mapping) detach() {
	m.of.mu.Lock()
	delete(m.of.mappings, m)
	m.of.mu.Unlock()
	m.use.Lock()
	defer m.use.Unlock()
	unix.Close(m.uffd)
	m.uffd = -1
}

// do calls f with the userfaultfd. errGone: there is none any more.
func (m *mapping) do(f func(fd int) error) error {
	m.use.RLock()
	defer m.use.RUnlock()
	if m.uffd < 0 {
		return errGone
	}
	err := f(m.uffd)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return errGone
	}
	return err
}

// clip is the part of a range of pages that is in the mapping.
func (m *mapping) clip(first, n uint64) (uint64, uint64) {
	lo, hi := max(first, m.first), min(first+n, m.first+m.n)
	if lo >= hi {
		return lo, 0
	}
	return lo, hi - lo
}

// protect write-protects those of a range of pages that are in the mapping.
func (m *mapping) protect(first, n uint64) error {
	first, n = m.clip(first, n)
	if n == 0 {
		return nil
	}
	err := m.do(func(fd int) error { return uffd.WriteProtect(fd, m.of.address(first), n*pageBytes, true) })
	if !errors.Is(err, errGone) {
		return err
	}
	// The program has ended, or has unmapped some of the pages by itself: then the others are protected one by one.
	for p := first; p < first+n; p++ {
		if err := m.do(func(fd int) error { return uffd.WriteProtect(fd, m.of.address(p), pageBytes, true) }); err != nil && !errors.Is(err, errGone) {
			return fmt.Errorf("protecting a page of process %d: %w", m.pid, err)
		}
	}
	return nil
}

// show maps pages that are in memory, for loads alone unless writable is set.
// Preconditions: the frames of the pages are the caller's.
func (m *mapping) show(first, n uint64, writable bool) error {
	first, n = m.clip(first, n)
	if n == 0 {
		return nil
	}
	if m.shared {
		return m.do(func(fd int) error { return uffd.Continue(fd, m.of.address(first), n*pageBytes, !writable) })
	}
	m.mu.Lock() // nothing is poisoned meanwhile
	defer m.mu.Unlock()
	return m.do(func(fd int) error {
		for len(m.poisoned) > 0 && n > 0 { // one by one
			if !m.poisoned[first] {
				if err := uffd.Continue(fd, m.of.address(first), pageBytes, false); err != nil {
					return err
				}
			}
			first, n = first+1, n-1
		}
		return uffd.Continue(fd, m.of.address(first), n*pageBytes, false)
	})
}

// bring gives pages their first bytes, and maps them. In a shared mapping the kernel does both at once, and neither takes the lock of the memfd, which the giving
// back of pages has. An error: the pages have no bytes that are needed, or, if it is errStored, the first one alone has.
// Preconditions: the frames of the pages are the caller's, and new.
func (m *mapping) bring(first uint64, b []byte, v visible) error {
	at := v.hidden * pageBytes
	if at > 0 {
		if err := m.of.put(first, b[:at]); err != nil {
			return err
		}
	}
	size := uint64(len(b))
	for m.shared && at < size {
		end, protect := size, true
		if v.store && at == 0 {
			end, protect = pageBytes, false
		}
		done := uint64(0)
		err := m.do(func(fd int) (err error) {
			done, err = uffd.Copy(fd, m.of.address(first)+at, b[at:end], protect)
			return err
		})
		if at += done; err != nil && done == 0 {
			break
		}
	}
	if at == size {
		return nil
	}
	if err := m.of.put(first+at/pageBytes, b[at:]); err != nil {
		if v.store && at > 0 {
			err = fmt.Errorf("%w: %w", errStored, err)
		}
		return err
	}
	rest := (size - at) / pageBytes
	if v.store && at == 0 {
		if m.show(first, 1, true) != nil {
			m.wake(first)
		}
		first, rest = first+1, rest-1
	}
	if m.show(first+at/pageBytes, rest, false) != nil {
		m.wake(first)
	}
	return nil
}

// allow lets the program store into a page.
// Preconditions: the page's frame is the caller's, and dirty.
func (m *mapping) allow(page uint64) error {
	return m.do(func(fd int) error { return uffd.WriteProtect(fd, m.of.address(page), pageBytes, false) })
}

// wake has threads that wait for a page try again.
func (m *mapping) wake(page uint64) {
	_ = m.do(func(fd int) error { return uffd.Wake(fd, m.of.address(page), pageBytes) })
}

// keep keeps the reason for which a page is poisoned.
func (m *mapping) keep(page uint64, reason error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reasons == nil || len(m.reasons) >= maxReasons {
		m.reasons = map[uint64]error{}
	}
	m.reasons[page] = reason
}

// poison ends the accesses that wait for a page with SIGBUS. absent: no program has the page mapped, and none maps it meanwhile. Then the write
// protection goes that it may have left, with which it could not be poisoned.
func (m *mapping) poison(page uint64, absent bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.do(func(fd int) error {
		if absent && m.shared {
			_ = uffd.Unprotect(fd, m.of.address(page), pageBytes)
		}
		return uffd.Poison(fd, m.of.address(page), pageBytes)
	})
	if err == nil && !m.shared {
		if m.poisoned == nil || len(m.poisoned) >= maxPoisoned {
			m.poisoned = map[uint64]bool{}
		}
		m.poisoned[page] = true
	}
	return err
}

// isPoisoned says whether a page of a private mapping is poisoned, or the program is about to ask why it was.
func (m *mapping) isPoisoned(page uint64) bool {
	if m.shared {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.poisoned[page]
}

// why takes the reason for which a page was poisoned.
func (m *mapping) why(page uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.reasons[page]
	delete(m.reasons, page)
	delete(m.poisoned, page)
	return err
}
