//go:build cgo && verbs

package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// asNobody runs one test again as a user without rights. again is false in that run.
func asNobody(t *testing.T, test string) (again bool) {
	if os.Getenv("VERBS_NOBODY") != "" {
		require.NotZero(t, os.Geteuid(), "still root")
		return false
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	cmd := exec.Command("setpriv", "--reuid", "65534", "--clear-groups", os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), "VERBS_NOBODY=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return true
}

func TestNoPermission(t *testing.T) {
	needDevice(t)
	if os.Getenv("VERBS_NOBODY") == "" {
		require.NoError(t, os.Chmod("/dev/infiniband/uverbs0", 0o600))
		defer os.Chmod("/dev/infiniband/uverbs0", 0o666)
	}
	if asNobody(t, "TestNoPermission") {
		return
	}
	_, err := NewDialer(Config{})
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, "/dev/infiniband")
	require.Equal(t, Objects{}, Live())
}

// Without the connection manager a device cannot be used; the error says what is missing.
func TestNoConnectionManager(t *testing.T) {
	needDevice(t)
	if os.Getenv("VERBS_NOBODY") == "" && os.Geteuid() == 0 {
		require.NoError(t, os.Chmod("/dev/infiniband/uverbs0", 0o666))
		require.NoError(t, os.Chmod("/dev/infiniband/rdma_cm", 0o600))
		defer os.Chmod("/dev/infiniband/rdma_cm", 0o666)
	}
	if asNobody(t, "TestNoConnectionManager") {
		return
	}
	_, err := NewDialer(Config{})
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, "/dev/infiniband/rdma_cm")
	require.Equal(t, Objects{}, Live())
}

func TestWrongAddress(t *testing.T) {
	needDevice(t)
	for _, a := range []string{"192.0.2.1", "2001:db8::1"} {
		_, err := NewDialer(Config{GID: netip.MustParseAddr(a)})
		require.ErrorIs(t, err, ErrDevice)
		require.ErrorContains(t, err, a)
	}
	d, err := NewDialer(Config{Device: os.Getenv("RXE_DEVICE"), Port: 1, GID: netip.MustParseAddr(os.Getenv("RXE_SELF"))})
	require.NoError(t, err)
	require.Equal(t, os.Getenv("RXE_SELF"), d.Caps().GID.String())
	require.NoError(t, d.Close())
	require.Equal(t, Objects{}, Live())
}

// Both ends may have IPv6 addresses instead.
func TestIPv6(t *testing.T) {
	needDevice(t)
	if os.Getenv("RXE_SELF6") == "" {
		t.Skip("no IPv6 address")
	}
	at := Config{GID: netip.MustParseAddr(os.Getenv("RXE_SELF6"))}
	s, err := NewServer(testCluster.UUID, testCluster.Ring(), 1, incarnations.Add(1), host.Limits{}, at, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close(context.Background())) }()
	m, err := host.NewMemory("test", 1<<20)
	require.NoError(t, err)
	defer m.Close()
	require.NoError(t, s.OpenRegion(t.Context(), 1, 1, m))
	l, err := net.Listen("tcp", "[::1]:0")
	require.NoError(t, err)
	go s.Serve(l)
	d, err := NewDialer(at)
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	_, to := open(t, d, l.Addr().String(), ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	times, _ := s.Registration()
	require.Equal(t, uint64(1), times, "registered when it was opened, and not again")
}

func TestPortDown(t *testing.T) {
	needDevice(t)
	if _, err := net.InterfaceByName("v0"); err != nil || os.Geteuid() != 0 {
		t.Skip("only in the virtual machine")
	}
	ip := func(args ...string) { require.NoError(t, exec.Command("ip", args...).Run(), args) }
	n := startNode(t, testCluster)
	caps := n.Caps()
	port := func() Port { return ReadPort("/", caps.Device, caps.Port) }
	require.True(t, port().Active)
	require.NotEmpty(t, port().Counters)
	ip("link", "set", "v0", "down")
	_, err := NewDialer(Config{})
	require.False(t, port().Active)
	require.Eventually(t, func() bool { return n.Events()["port error"] > 0 }, guard, time.Millisecond, "%v", n.Events())
	ip("link", "set", "v0", "up")
	require.Eventually(t, func() bool { return n.Events()["port active"] > 0 }, guard, time.Millisecond, "%v", n.Events())
	exec.Command("ip", "addr", "add", os.Getenv("RXE_SELF6")+"/64", "dev", "v0", "nodad").Run()
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, "not active")
	require.Eventually(t, func() bool {
		d, err := NewDialer(Config{GID: netip.MustParseAddr(os.Getenv("RXE_SELF"))})
		if err == nil {
			d.Close()
		}
		return err == nil
	}, guard, 10*time.Millisecond)
	select {
	case err := <-n.Err():
		t.Fatal("a port that was down for a moment does not end the node: ", err)
	default:
	}
	n.Stop()
	require.Equal(t, Objects{}, Live())
}

// A node says why it has to end when its completion queue, and with it every fence, is lost.
func TestAdapterFails(t *testing.T) {
	n := startNode(t, testCluster)
	n.heard("port error", eventBad)
	n.heard("port active", eventTold)
	require.Empty(t, n.Err())
	n.heard("local catastrophic error", eventFatal)
	n.heard("CQ error", eventQueue) // once is enough
	err := <-n.Err()
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, n.Caps().Device+": event of the device: local catastrophic error")
	require.Empty(t, n.Err())
}

func TestAtomicsAreNeeded(t *testing.T) {
	for scope, want := range map[int]string{1: "hca", 2: "global", 0: "none", 3: "none"} {
		got, err := atomicScope("x", false, scope, AtomicsAuto)
		require.NoError(t, err)
		require.Equal(t, want, got)
		got, err = atomicScope("x", true, scope, AtomicsAuto)
		require.NoError(t, err)
		require.Equal(t, "none", got, "a node whose adapter executes atomics tells no addresses, which iWARP needs")
		_, err = atomicScope("x", true, scope, AtomicsRequired)
		require.ErrorContains(t, err, "no atomics")
		got, err = atomicScope("siw0", false, scope, AtomicsRequired)
		if want != "none" {
			require.NoError(t, err)
			require.Equal(t, want, got)
			continue
		}
		require.ErrorContains(t, err, "siw0 has no atomics of 8 bytes, which --rdma-atomics required asks for")
		require.ErrorContains(t, err, "tcp")
	}
}

// A hello whose sender has given up, read after that of a later connection, must not
// take the lane.
func TestLateHello(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	nc, err := net.Dial("tcp", n.addr)
	require.NoError(t, err)
	defer nc.Close()
	tk := ticket(1, 0, rdma.ReadWrite)
	late := append(appendIntro(nil), rdmatest.Hello(t, nc, tk, 0)...)
	_, err = nc.Write(late[:60])
	require.NoError(t, err)
	d := newDialer(t)
	_, to := open(t, d, n.addr, tk, 0)
	_, err = nc.Write(late[60:])
	require.NoError(t, err)
	nc.SetReadDeadline(time.Now().Add(guard))
	var b [host.WelcomeBytes]byte
	_, err = io.ReadFull(nc, b[:])
	require.NoError(t, err)
	w, err := host.DecodeWelcome(b[:])
	require.NoError(t, err)
	require.ErrorIs(t, w.Err, rdma.ErrBroken)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err, "the later connection keeps the lane")
}

// TestTwoMachines is run in both of two machines joined by a wire: see test-rdma.sh two.
// Light, since heavy traffic has crashed guests.
func TestTwoMachines(t *testing.T) {
	const port, over = "7431", uint64(1) << 60
	switch os.Getenv("RXE_ROLE") {
	case "server":
		s, err := NewServer(testCluster.UUID, testCluster.Ring(), 1, 1, host.Limits{}, Config{}, nil)
		require.NoError(t, err)
		m, err := host.NewMemory("test", 1<<20)
		require.NoError(t, err)
		require.NoError(t, s.OpenRegion(t.Context(), 1, 1, m))
		l, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("RXE_SELF"), port))
		require.NoError(t, err)
		go s.Serve(l)
		words := words(m.Bytes()[:8])
		require.Eventually(t, func() bool { return words[0] >= over }, guard, 10*time.Millisecond, "the other machine has not finished")
		require.Equal(t, over+300, words[0])
		require.NoError(t, s.Close(context.Background()))
		require.Equal(t, Objects{}, Live())
	case "client":
		d := newDialer(t)
		var c rdma.Conn
		require.Eventually(t, func() (ok bool) {
			var err error
			c, err = d.Dial(t.Context(), net.JoinHostPort(os.Getenv("RXE_PEER"), port), ticket(1, 0, rdma.ReadWrite), 0)
			return err == nil
		}, guard, 100*time.Millisecond)
		defer c.Close()
		w, err := c.Open(t.Context(), 1, 1)
		require.NoError(t, err)
		to := &rdma.Target{Conn: c, Window: w}
		start := time.Now()
		for i := range uint64(300) {
			got := chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) })
			require.NoError(t, got.Err)
			require.Equal(t, i, got.Verbs[0].Old)
		}
		each := time.Since(start) / 300
		out, in := bytes.Repeat([]byte{7}, 4096), make([]byte, 4096)
		for range 20 {
			require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(8192, out); c.Read(8192, in) }).Err)
			require.Equal(t, out, in)
		}
		fmt.Printf("two machines: FETCH_ADD %v, WRITE and READ of 4 KiB whole\n", each)
		require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, over) }).Err)
	default:
		t.Skip("run verify/rxevm/test-rdma.sh two")
	}
}

// A session that the adapter has to refuse again and again is ended; others go on.
func TestSecurity03_RefusedTooOften(t *testing.T) {
	needDevice(t)
	s, err := NewServer(testCluster.UUID, testCluster.Ring(), 1, incarnations.Add(1), host.Limits{Offences: 3}, Config{}, nil)
	require.NoError(t, err)
	m, err := host.NewMemory("test", 1<<20)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go s.Serve(l)
	t.Cleanup(func() {
		require.NoError(t, s.Close(context.Background()))
		require.NoError(t, m.Close())
	})
	require.NoError(t, s.OpenRegion(t.Context(), 1, 1, m))
	d := newDialer(t)
	_, other := open(t, d, l.Addr().String(), ticket(2, 0, rdma.ReadWrite), 0)
	c, to := open(t, d, l.Addr().String(), ticket(1, 0, rdma.ReadWrite), 0)
	refused := 0
	require.Eventually(t, func() bool {
		if len(c.windows) > 0 {
			c.windows[0].rkey ^= 0x5500
		}
		err := chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err
		if refused++; err == nil {
			t.Error("a forged key was taken")
		}
		return errors.Is(to.Conn.Reset(t.Context()), rdma.ErrRevoked)
	}, guard, time.Millisecond)
	require.Greater(t, refused, 3)
	require.Equal(t, uint64(1), s.Expelled())
	require.NoError(t, chain(other, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
}
