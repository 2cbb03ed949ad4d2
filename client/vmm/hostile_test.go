package vmm_test

import (
	"net"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/internal/uffd"
)

// TestHostilePrograms: what a program sends out of order, or wrong, is refused or ends its own connection, and the others are served.
func TestHostilePrograms(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--memory", "1MiB")
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base()+mib/2, mib/2, vmm.Release, h.options())
	require.NoError(t, err)
	id := s.Identity()
	good := pagerlink.Request{Op: pagerlink.OpMap, Version: pagerlink.Version, Space: id.Name, Cluster: id.Cluster, Tenant: id.Tenant, Base: id.Base, Region: id.Region,
		Address: id.Base, Bytes: 4 * page, Mode: "release"}
	dial := func() *pagerlink.Conn {
		link, err := pagerlink.Dial(h.socket)
		require.NoError(t, err)
		t.Cleanup(func() { link.Close() })
		require.NoError(t, link.SetReadDeadline(time.Now().Add(patience)))
		return link
	}
	answer := func(link *pagerlink.Conn, q any, fds ...int) pagerlink.Reply {
		t.Helper()
		require.NoError(t, link.Send(q, fds...))
		var r pagerlink.Reply
		got, err := link.Receive(&r)
		require.NoError(t, err)
		pagerlink.CloseAll(got)
		return r
	}

	// Messages before a mapping.
	for says, change := range map[string]func(q *pagerlink.Request){
		"before a mapping":  func(q *pagerlink.Request) { q.Op = pagerlink.OpSync },
		"version 1":         func(q *pagerlink.Request) { q.Version = 2 },
		"mode \"\"":         func(q *pagerlink.Request) { q.Mode = "" },
		"another cluster":   func(q *pagerlink.Request) { q.Cluster[3]++ },
		"tenant 9":          func(q *pagerlink.Request) { q.Tenant = 9 },
		"no such name":      func(q *pagerlink.Request) { q.Space = "none" },
		"made again":        func(q *pagerlink.Request) { q.Region++ },
		"whole pages":       func(q *pagerlink.Request) { q.Bytes-- },
		"0x100000000000 to": func(q *pagerlink.Request) { q.Bytes = 1<<64 - page },
	} {
		q := good
		change(&q)
		require.Contains(t, answer(dial(), q).Error, says)
	}
	// No messages at all.
	for _, text := range []string{"{", "[1]", strings.Repeat("x", 100_000), "{\"op\": 7}"} {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: h.socket, Net: "unixpacket"})
		require.NoError(t, err)
		_, err = c.Write([]byte(text))
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		n, _ := c.Read(make([]byte, 10))
		require.Zero(t, n, "the connection ends")
		c.Close()
	}
	// A mapping without a userfaultfd, with something else, with two, and one whose program goes away.
	file, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(file)
	fault, _, err := uffd.Open()
	require.NoError(t, err)
	defer unix.Close(fault)
	for _, fds := range [][]int{nil, {file}, {fault, fault}} {
		link := dial()
		require.Empty(t, answer(link, good).Error)
		require.NotEmpty(t, answer(link, pagerlink.Request{Op: pagerlink.OpAttach}, fds...).Error)
	}
	link := dial()
	require.Empty(t, answer(link, good).Error)
	require.NoError(t, link.Close())
	// Requests about what is not in the mapping, and one that there is not.
	link = dial()
	require.Empty(t, answer(link, good).Error)
	require.Empty(t, answer(link, pagerlink.Request{Op: pagerlink.OpAttach}, fault).Error)
	for _, q := range []pagerlink.Request{
		{Op: pagerlink.OpSync, Address: id.Base + 4*page, Bytes: 1}, {Op: pagerlink.OpAcquire, Address: id.Base - 1, Bytes: 8}, {Op: pagerlink.OpPrefetch, Address: id.Base, Bytes: 1<<64 - 1},
		{Op: pagerlink.OpWhy, Address: 1<<64 - 8, Bytes: 16}, {Op: pagerlink.OpSync, Address: id.Base}, {Op: "format", Address: id.Base, Bytes: 1},
	} {
		require.NotEmpty(t, answer(link, q).Error, "%+v", q)
	}
	require.Empty(t, answer(link, pagerlink.Request{Op: pagerlink.OpPrefetch, Address: id.Base, Bytes: 4 * page}).Error, "pages that its userfaultfd does not map")
	require.NoError(t, link.Close())

	require.NoError(t, m.Do(func() { m.Bytes()[0] = 1 }))
	require.NoError(t, m.Close())
	require.Eventually(t, func() bool { return h.metric("quarry_pager_mappings") == 0 && h.metric("quarry_pager_spaces") == 0 }, patience, 10*time.Millisecond, "nothing is left of them")
}

// TestMappingThatCannotBeServed: where the kernel refuses to map a page in a program, the access ends with a reason and does not wait for ever.
func TestMappingThatCannotBeServed(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	id := k.space("s", mib, space.Options{}).Identity()
	link, err := pagerlink.Dial(h.socket)
	require.NoError(t, err)
	defer link.Close()
	require.NoError(t, link.SetReadDeadline(time.Now().Add(patience)))
	exchange := func(q pagerlink.Request, fds ...int) (r pagerlink.Reply, got []int) {
		require.NoError(t, link.Send(q, fds...))
		got, err := link.Receive(&r)
		require.NoError(t, err)
		return r, got
	}
	_, fds := exchange(pagerlink.Request{Op: pagerlink.OpMap, Version: pagerlink.Version, Space: id.Name, Cluster: id.Cluster, Tenant: id.Tenant, Base: id.Base, Region: id.Region,
		Address: id.Base, Bytes: mib, Mode: "release"})
	require.Len(t, fds, 1)
	defer pagerlink.CloseAll(fds)
	mem, err := uffd.MapAt(fds[0], 0, id.Base, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	defer uffd.Unmap(mem)
	fault, _, err := uffd.Open()
	require.NoError(t, err)
	defer unix.Close(fault)
	// Without write protection, which the pager asks for when it maps a page.
	require.NoError(t, uffd.Register(fault, id.Base, mib, false))
	r, _ := exchange(pagerlink.Request{Op: pagerlink.OpAttach}, fault)
	require.Empty(t, r.Error)
	failed := make(chan any)
	go func() {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() { failed <- recover() }()
		sink = mem[page]
	}()
	select {
	case p := <-failed:
		require.NotNil(t, p, "the access fails")
	case <-time.After(patience):
		t.Fatal("the access waits for ever")
	}
	r, _ = exchange(pagerlink.Request{Op: pagerlink.OpWhy, Address: id.Base + page, Bytes: page})
	require.Contains(t, r.Error, "mapping a page of process")
}

// TestProgramThatReadsNoReplies: it does not keep the pager from its end, which writes the stores of others back.
func TestProgramThatReadsNoReplies(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Do(func() { m.Bytes()[5] = 7 }))
	id := s.Identity()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: h.socket, Net: "unixpacket"})
	require.NoError(t, err)
	link := pagerlink.New(c)
	defer link.Close()
	for _, q := range []pagerlink.Request{
		{Op: pagerlink.OpMap, Version: pagerlink.Version, Space: id.Name, Cluster: id.Cluster, Tenant: id.Tenant, Base: id.Base, Region: id.Region, Address: id.Base, Bytes: mib, Mode: "release"},
		{Op: pagerlink.OpAttach},
	} {
		var fds []int
		if q.Op == pagerlink.OpAttach {
			fault, _, err := uffd.Open()
			require.NoError(t, err)
			defer unix.Close(fault)
			fds = []int{fault}
		}
		require.NoError(t, link.Send(q, fds...))
		var r pagerlink.Reply
		got, err := link.Receive(&r)
		require.NoError(t, err)
		require.Empty(t, r.Error)
		pagerlink.CloseAll(got)
	}
	// Until the pager takes no more requests, because it cannot send replies.
	require.NoError(t, link.SetWriteDeadline(time.Now().Add(3*time.Second)))
	for err == nil {
		err = link.Send(pagerlink.Request{Op: pagerlink.OpWhy, Address: id.Base, Bytes: page})
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, h.pager.Stop(), "%s", h.pager.Log())
	require.EqualValues(t, 7<<40, values(t, s)[0])
	require.ErrorIs(t, m.Close(), vmm.ErrLost)
}
