package pager

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/internal/uffd"
)

// guardFD is the guard's end of its socket.
const guardFD = 3

// watched tells the guard of a mapping, with the memfd and the userfaultfd; or, without descriptors, that it has ended.
type watched struct {
	Number  uint64 `json:"number"`
	Address uint64 `json:"address,omitempty"`
	Bytes   uint64 `json:"bytes,omitempty"`
}

// guard is the pager's end of the guard process.
type guard struct {
	link  *pagerlink.Conn
	ended chan struct{} // closed when the process has ended
}

// startGuard starts the guard process.
func startGuard(command []string) (*guard, error) {
	if len(command) == 0 {
		return nil, errors.New("a pager needs the command of its guard")
	}
	link, other, err := pagerlink.Pair()
	if err != nil {
		return nil, err
	}
	defer other.Close()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.ExtraFiles = []*os.File{other}
	cmd.Stderr = os.Stderr
	// An interrupt at the terminal is for the pager, which writes dirty pages back first.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		link.Close()
		return nil, fmt.Errorf("guard of the pager: %w", err)
	}
	g := &guard{link: link, ended: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(g.ended)
	}()
	// Its answer says that it runs.
	if _, err := link.Receive(&watched{}); err != nil {
		link.Close()
		<-g.ended
		return nil, fmt.Errorf("guard of the pager, %v, has not started: %w", command, err)
	}
	return g, nil
}

// add has the guard end a mapping with the pager. nil: the guard has the descriptors, or has ended.
func (g *guard) add(number uint64, m *mapping, userfault int) error {
	return g.link.Send(watched{Number: number, Address: m.of.address(m.first), Bytes: m.n * pageBytes}, m.of.fd, userfault)
}

// drop has the guard forget a mapping.
func (g *guard) drop(number uint64) { _ = g.link.Send(watched{Number: number}) }

// close has the guard end all mappings that it knows, and waits until their programs have unmapped them, for lastReplies at most: one may be stopped.
func (g *guard) close() {
	g.link.Close()
	select {
	case <-g.ended:
	case <-time.After(lastReplies):
	}
}

// kept is what the guard has of a mapping.
type kept struct {
	watched
	fds []int // memfd, userfaultfd
}

// RunGuard is the guard process: it keeps the descriptors of all mappings, and ends the mappings when the pager has ended. It returns when no program has one
// any more.
func RunGuard() error {
	link, err := pagerlink.FromFile(os.NewFile(guardFD, "guard"))
	if err != nil {
		return fmt.Errorf("only a pager starts its guard: %w", err)
	}
	if err := link.Send(watched{}); err != nil {
		return err
	}
	all := map[uint64]kept{}
	for {
		var w watched
		fds, err := link.Receive(&w)
		if err != nil {
			break
		}
		if old, ok := all[w.Number]; ok {
			pagerlink.CloseAll(old.fds)
			delete(all, w.Number)
		}
		if len(fds) == 2 {
			all[w.Number] = kept{w, fds}
		} else {
			pagerlink.CloseAll(fds)
		}
	}
	quiet()
	return endMappings(slices.Collect(maps.Values(all)))
}

// quiet puts /dev/null in the place of descriptors that this process shares with the pager, such as pipes: their readers wait until all copies are closed.
func quiet() {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	for fd := range guardFD {
		_ = unix.Dup3(null, fd, 0)
	}
	unix.Close(null)
}

// endMappings takes all pages out of the memories, and poisons every page that a program touches, until no program has a mapping any more. The memories
// cannot be cut to no bytes, because a program that did so would end the pager.
func endMappings(all []kept) error {
	var errs []error
	for _, k := range all {
		var st unix.Stat_t
		err := unix.Fstat(k.fds[0], &st)
		if err == nil {
			err = uffd.Discard(k.fds[0], 0, st.Size)
		}
		errs = append(errs, err)
	}
	for _, k := range all { // what the pager has read the events of
		_ = uffd.Wake(k.fds[1], k.Address, k.Bytes)
	}
	for len(all) > 0 {
		fds := make([]unix.PollFd, len(all))
		for i, k := range all {
			fds[i] = unix.PollFd{Fd: int32(k.fds[1]), Events: unix.POLLIN}
		}
		n, err := unix.Poll(fds, int(endEvery/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return errors.Join(append(errs, err)...)
		}
		for i := range fds {
			if n > 0 && fds[i].Revents != 0 {
				all[i].poisonTouched()
			}
		}
		all = slices.DeleteFunc(all, kept.unmapped)
	}
	return errors.Join(errs...)
}

// endEvery is how often the guard looks at mappings that no program touches.
const endEvery = 100 * time.Millisecond

// poisonTouched ends the accesses that wait.
func (k kept) poisonTouched() {
	var b [16 * uffd.EventBytes]byte
	n, err := unix.Read(k.fds[1], b[:])
	if err != nil {
		return
	}
	for at := 0; at+uffd.EventBytes <= n; at += uffd.EventBytes {
		e, ok := uffd.Parse(b[at:])
		if !ok {
			continue
		}
		// Nothing is mapped here by a page of the memory any more, so that no store gets by.
		_ = uffd.Unprotect(k.fds[1], e.Addr, pageBytes)
		if uffd.Poison(k.fds[1], e.Addr, pageBytes) != nil { // it is poisoned
			_ = uffd.Wake(k.fds[1], e.Addr, pageBytes)
		}
	}
}

// unmapped says whether the program has ended, or has unmapped the mapping, and then closes its descriptors.
func (k kept) unmapped() bool {
	for _, at := range []uint64{k.Address, k.Address + k.Bytes - pageBytes} {
		err := uffd.Continue(k.fds[1], at, pageBytes, false) // maps nothing: the page is not there
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH) {
			return false
		}
	}
	pagerlink.CloseAll(k.fds)
	return true
}
