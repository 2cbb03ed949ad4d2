package pager

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

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

// close ends all mappings that the guard knows, and waits for it.
func (g *guard) close() {
	g.link.Close()
	<-g.ended
}

// RunGuard is the guard process: it keeps the descriptors of all mappings, and ends the mappings when the pager has ended. Then it returns.
func RunGuard() error {
	link, err := pagerlink.FromFile(os.NewFile(guardFD, "guard"))
	if err != nil {
		return fmt.Errorf("only a pager starts its guard: %w", err)
	}
	if err := link.Send(watched{}); err != nil {
		return err
	}
	type kept struct {
		watched
		fds []int // memfd, userfaultfd
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
	var errs []error
	for _, k := range all {
		if err := unix.Ftruncate(k.fds[0], 0); err != nil {
			errs = append(errs, fmt.Errorf("ending a mapping: %w", err))
		}
	}
	for _, k := range all {
		_ = uffd.Wake(k.fds[1], k.Address, k.Bytes)
	}
	return errors.Join(errs...)
}
