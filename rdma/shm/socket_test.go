package shm_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestListenErrors(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := shm.Listen(path)
	require.NoError(t, err)
	_, err = shm.Listen(path)
	require.ErrorContains(t, err, "another storage node listens there")
	l.SetUnlinkOnClose(false)
	l.Close()
	l, err = shm.Listen(path) // left by a node that died
	require.NoError(t, err)
	l.Close()

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	_, err = shm.Listen(file)
	require.ErrorContains(t, err, file)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "precious", string(b))

	_, err = shm.Listen(filepath.Join(dir, strings.Repeat("x", 200)))
	require.ErrorContains(t, err, "too long")
	_, err = shm.NewDialer().Dial(t.Context(), filepath.Join(dir, "nobody"), cluster.Ticket(1, rdma.ReadWrite), 0)
	require.ErrorIs(t, err, rdma.ErrBroken)
}

// HAZARDS, security 9: what a read-only session is sent cannot be mapped for writing.
func TestSecurity09_ReadOnlyDescriptor(t *testing.T) {
	_, m, addr := node(t, host.Limits{})
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(rdmatest.Hello(t, c, cluster.Ticket(1, rdma.ReadOnly), 0))
	require.NoError(t, err)
	page := descriptor(t, c)
	defer page.Close()
	open := host.OpenRequest{Region: 1, Epoch: 1}
	_, err = c.Write(open.Append(nil))
	require.NoError(t, err)
	memory := descriptor(t, c)
	defer memory.Close()
	fd := int(memory.Fd())
	_, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.ErrorIs(t, err, unix.EACCES)
	mem, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	require.ErrorIs(t, unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	_, err = unix.Pwrite(fd, []byte{1}, 0)
	require.ErrorIs(t, err, unix.EBADF)
	require.Error(t, unix.Ftruncate(fd, 0))
	require.Zero(t, m.Bytes()[0])
}

func descriptor(t *testing.T, c *net.UnixConn) *os.File {
	var b, oob [256]byte
	c.SetReadDeadline(time.Now().Add(time.Minute))
	_, n, _, _, err := c.ReadMsgUnix(b[:], oob[:])
	require.NoError(t, err)
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	require.NoError(t, err)
	require.Len(t, messages, 1)
	fds, err := unix.ParseUnixRights(&messages[0])
	require.NoError(t, err)
	return os.NewFile(uintptr(fds[0]), "received")
}

// The size of memory that is sent is sealed: nobody can make the node, or another
// client, fault on it.
func TestSizesAreSealed(t *testing.T) {
	_, m, _ := node(t, host.Limits{})
	f, err := m.Descriptor(true)
	require.NoError(t, err)
	defer f.Close()
	require.Error(t, f.Truncate(0))
	require.Error(t, f.Truncate(1<<30))
	page, err := host.NewSharedPage()
	require.NoError(t, err)
	defer page.Close()
	require.Error(t, page.Truncate(0))
}

// Garbage on the socket ends that connection and nothing else.
func TestSecurity05_Garbage(t *testing.T) {
	a, _, addr := node(t, host.Limits{})
	is := func(b ...byte) func([]byte) []byte { return func([]byte) []byte { return b } }
	same := func(hello []byte) []byte { return hello }
	for _, messages := range [][]func(hello []byte) []byte{
		{is()}, {is(1)}, {is(make([]byte, 88)...)}, {is(make([]byte, 4096)...)},
		{func(hello []byte) []byte { return hello[:50] }}, {func(hello []byte) []byte { return append(hello, 0) }},
		{same, is(1, 2, 3)}, {same, is(make([]byte, 5000)...)}, {same, same},
	} {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
		require.NoError(t, err)
		hello := rdmatest.Hello(t, c, cluster.Ticket(1, rdma.ReadWrite), 0)
		for _, message := range messages {
			c.Write(message(bytes.Clone(hello)))
		}
		c.SetReadDeadline(time.Now().Add(time.Minute))
		var b [256]byte
		for n := 1; n > 0 && err == nil; {
			n, err = c.Read(b[:])
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		}
		c.Close()
	}
	for end := time.Now().Add(time.Minute); len(a.Sessions()) > 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end))
	}
}

// Region memory is unmapped once its epoch is over, shared by lanes until then,
// and not kept by clients of a node that has gone.
func TestUnmapping(t *testing.T) {
	a, m, addr := node(t, host.Limits{})
	maps := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return strings.Count(string(b), "memfd:quarry-test")
	}
	base := maps()
	d := shm.NewDialer()
	var lanes []*rdma.Target
	for i := range uint32(3) {
		c, err := d.Dial(t.Context(), addr, cluster.Ticket(1, rdma.ReadWrite), i)
		require.NoError(t, err)
		defer c.Close()
		w, err := c.Open(t.Context(), 1, 1)
		require.NoError(t, err)
		lanes = append(lanes, &rdma.Target{Conn: c, Window: w})
	}
	require.Equal(t, base+1, maps(), "three lanes, one mapping")
	require.NoError(t, a.CloseRegion(t.Context(), 1, 1))
	for _, to := range lanes {
		var r rdma.Round
		r.Chain(to).FetchAdd(0, 1)
		rdma.Do(&r)
		require.ErrorIs(t, r.Err(), rdma.ErrKey)
	}
	require.Equal(t, base, maps(), "unmapped on the refusal")
	require.NoError(t, a.OpenRegion(t.Context(), 1, 2, m))
	for _, to := range lanes {
		w, err := to.Conn.Open(t.Context(), 1, 2)
		require.NoError(t, err)
		to.Window = w
	}
	require.Equal(t, base+1, maps())
	require.NoError(t, a.Close(context.Background()))
	for end := time.Now().Add(time.Minute); maps() != base-0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the memory of a node that has gone stays mapped")
	}
}

// A file is locked by its writers: a new node waits until clients of the former
// one have let it go.
func TestHazard32_FileIsLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	m, err := host.OpenMemory(path, 1<<20, true)
	require.NoError(t, err)
	_, err = host.OpenMemory(path, 1<<20, true)
	require.ErrorContains(t, err, "is mapped by another storage node")
	f, err := m.Descriptor(true) // what a client is sent
	require.NoError(t, err)
	mem, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	f.Close()
	require.NoError(t, m.Close()) // the node is gone
	_, err = host.OpenMemory(path, 1<<20, true)
	require.Error(t, err, "a client still writes to it")
	require.NoError(t, unix.Munmap(mem))
	m, err = host.OpenMemory(path, 1<<20, false)
	require.NoError(t, err)
	require.NoError(t, m.Close())
}

// A hello that was seen is refused on every other connection.
func TestHelloIsNotReplayed(t *testing.T) {
	_, _, addr := node(t, host.Limits{})
	open := func(answer func(c *net.UnixConn) []byte) host.Welcome {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: addr, Net: "unixpacket"})
		require.NoError(t, err)
		defer c.Close()
		_, err = c.Write(answer(c))
		require.NoError(t, err)
		var b [host.WelcomeBytes]byte
		n, err := c.Read(b[:])
		require.NoError(t, err)
		w, err := host.DecodeWelcome(b[:n])
		require.NoError(t, err)
		return w
	}
	var seen []byte
	require.NoError(t, open(func(c *net.UnixConn) []byte {
		seen = rdmatest.Hello(t, c, cluster.Ticket(1, rdma.ReadWrite), 3)
		return seen
	}).Err)
	w := open(func(c *net.UnixConn) []byte {
		rdmatest.Hello(t, c, cluster.Ticket(1, rdma.ReadWrite), 3) // takes the challenge
		return seen
	})
	require.ErrorIs(t, w.Err, rdma.ErrTicket)
}
