package vmm_test

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/pagerlink"
)

func init() {
	programs["parent"] = parentProgram
}

// TestPagesThatFail: an access ends although its page was mapped before, and a goroutine that asks late why it has failed takes no store of another one.
func TestPagesThatFail(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host("--transport", "tcp", "--fault-timeout", "3s")
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(ctx, s, s.Base(), mib/2, vmm.Release, h.options())
	require.NoError(t, err)
	p, err := vmm.Map(ctx, s, s.Base()+mib/2, mib/2, vmm.Private, h.options())
	require.NoError(t, err)
	load := func() error { return m.Do(func() { sink = m.Bytes()[0] }) }
	store := func() error { return p.Do(func() { p.Bytes()[0] = 7 }) }
	eventually := func(f func() error) {
		t.Helper()
		require.Eventually(t, func() bool { return f() == nil }, patience, 10*time.Millisecond)
	}
	eventually(load)
	_, err = s.WriteAt([]byte("elsewhere"), int64(s.Base()))
	require.NoError(t, err)
	eventually(func() error {
		n, err := m.Acquire(ctx, s.Base(), page)
		if err == nil && n != 1 {
			t.Error("not dropped")
		}
		return err
	})
	goOn := k.hang("n1")
	failed := make(chan error, 1)
	go func() { failed <- load() }()
	select {
	case err := <-failed:
		require.ErrorContains(t, err, "reading 4096 bytes")
	case <-time.After(patience):
		t.Fatal("the access waits for ever")
	}
	// Two goroutines fail on one page of the private mapping.
	held, release, late := make(chan bool), make(chan bool), make(chan error)
	go func() {
		late <- p.Do(func() {
			defer func() {
				r := recover()
				held <- true
				<-release
				panic(r)
			}()
			sink = p.Bytes()[0]
		})
	}()
	<-held
	require.ErrorContains(t, store(), "reading 4096 bytes")
	goOn()
	eventually(store)
	close(release)
	err = <-late
	require.ErrorContains(t, err, "reading 4096 bytes")
	require.NotErrorIs(t, err, vmm.ErrLost)
	require.EqualValues(t, 7, p.Bytes()[0])
	eventually(load)
	require.Equal(t, "elsewhere", string(m.Bytes()[:9]))
	require.NoError(t, p.Close())
	require.NoError(t, m.Close())
}

// parentProgram stores into its mapping, and forks a child that executes nothing else.
func parentProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	fill(m, 7)
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 { // one thread, and no runtime
		for fd := range uintptr(3) { // for whose end the test waits
			syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
		}
		for {
			syscall.RawSyscall6(syscall.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	fmt.Println(pid)
	p.hear()
	return nil
}

// TestChildOutlivesItsParent: the end of a program is noticed although a child has its descriptors.
func TestChildOutlivesItsParent(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", mib, space.Options{})
	c := h.start("parent", s, nil)
	pid, err := strconv.Atoi(c.hear())
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	c.kill()
	require.Eventually(t, func() bool { return h.metric("quarry_pager_mappings") == 0 }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return values(t, s)[17] == 7 }, patience, 10*time.Millisecond, "its stores are written back")
	require.NoError(t, syscall.Kill(pid, 0), "the child lives")
}

// TestMemoryCannotBeCut: a program cannot change the size of the memory that all of them share.
func TestMemoryCannotBeCut(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Do(func() { m.Bytes()[0] = 1 }))
	link, err := pagerlink.Dial(h.socket)
	require.NoError(t, err)
	defer link.Close()
	id := s.Identity()
	require.NoError(t, link.Send(pagerlink.Request{Op: pagerlink.OpMap, Version: pagerlink.Version, Space: id.Name, Cluster: id.Cluster, Tenant: id.Tenant, Base: id.Base,
		Region: id.Region, Address: id.Base, Bytes: mib, Mode: "release"}))
	var r pagerlink.Reply
	fds, err := link.Receive(&r)
	require.NoError(t, err)
	require.Len(t, fds, 1)
	defer pagerlink.CloseAll(fds)
	for _, size := range []int64{0, page, 1 << 50} {
		require.ErrorIs(t, unix.Ftruncate(fds[0], size), os.ErrPermission)
	}
	_, err = unix.FcntlInt(uintptr(fds[0]), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE)
	require.ErrorIs(t, err, os.ErrPermission, "nor keep the pager from giving pages back")
	require.NoError(t, m.Close(), "its store is written back")
	require.EqualValues(t, 1, values(t, s)[0])
}

// TestPrefetchWithoutMemory: it does not say that it has read pages for which there was no memory.
func TestPrefetchWithoutMemory(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host("--memory", "1MiB")
	s := k.space("s", 2*mib, space.Options{})
	m, err := vmm.Map(ctx, s, s.Base(), 2*mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Do(func() {
		for at := mib/page - 1; at >= 0; at-- { // downwards nothing is read ahead
			m.Bytes()[at*page] = 1
		}
	}))
	require.Equal(t, mib/page, h.metric("quarry_pager_dirty_pages"))
	require.NoError(t, space.Delete(ctx, k.c, "s"))
	require.Eventually(t, func() bool { return m.Sync(ctx, s.Base(), page) != nil }, patience, 10*time.Millisecond, "nodes give the memory back behind the answer")
	require.ErrorContains(t, m.Prefetch(ctx, s.Base()+mib, mib), "no memory could be freed")
	require.Error(t, m.Close())
}
