//go:build cgo && verbs

package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/verify/teststop"
)

// guard bounds the wait for what must come: it ends a test that hangs, and no other.
const guard = 3 * time.Minute

var testCluster = rdmatest.Cluster{UUID: [16]byte{7}, Key: keyring.NewSigner([32]byte{8})}

func ticket(serial uint64, tenant uint32, rights rdma.Rights) *rdma.Credentials {
	t := testCluster.Ticket(serial, rights)
	t.Tenant = tenant
	t.Sign(testCluster.Key)
	return t
}

// open dials a lane and opens region 1 under epoch 1.
func open(t testing.TB, d *Dialer, addr string, tk *rdma.Credentials, number uint32) (*conn, *rdma.Target) {
	c, err := d.Dial(t.Context(), addr, tk, number)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	w, err := c.Open(t.Context(), 1, 1)
	require.NoError(t, err)
	return c.(*conn), &rdma.Target{Conn: c, Window: w}
}

func chain(to *rdma.Target, deadline time.Duration, f func(c *rdma.Chain)) *rdma.Chain {
	r := rdma.Round{Deadline: clock.In(deadline)}
	f(r.Chain(to))
	rdma.Do(&r)
	return r.At(0)
}

func arena(t testing.TB, d *Dialer, bytes int) *rdma.Arena {
	a, err := rdma.NewArena(bytes)
	require.NoError(t, err)
	t.Cleanup(func() { a.Close() })
	require.NoError(t, d.Register(a.Bytes()))
	return a
}

// What the adapter itself enforces, with the checks of the client's end cut out:
// forge changes what the lane believes to have been granted.
func TestAdapterRefuses(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	_, victim := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(victim, guard, func(c *rdma.Chain) { c.Write(0, bytes.Repeat([]byte{9}, 64)) }).Err)
	require.NoError(t, n.openOf(t.Context(), 2, 2, 1))
	fc, err := d.Dial(t.Context(), n.addr, ticket(2, 2, rdma.ReadWrite), 0)
	require.NoError(t, err)
	t.Cleanup(func() { fc.Close() })
	_, err = fc.Open(t.Context(), 2, 1)
	require.NoError(t, err)
	foreign := fc.(*conn)
	for name, test := range map[string]struct {
		rights rdma.Rights
		forge  func(c *conn)
		verb   func(c *rdma.Chain)
		done   int // the READ before the verb, where its key is good
	}{
		"wrong key":      {rdma.ReadWrite, func(c *conn) { c.windows[0].rkey ^= 0x5500 }, func(c *rdma.Chain) { c.Write(0, make([]byte, 8)) }, 0},
		"another tenant": {rdma.ReadWrite, func(c *conn) { c.windows[0].rkey = foreign.windows[0].rkey }, func(c *rdma.Chain) { c.Write(0, make([]byte, 8)) }, 0},
		"out of bounds":  {rdma.ReadWrite, func(c *conn) { c.windows[0].Bytes *= 2 }, func(c *rdma.Chain) { c.Write(rdmatest.RegionBytes-4, make([]byte, 8)) }, 1},
		"read only":      {rdma.ReadOnly, func(c *conn) { c.as.Rights = rdma.ReadWrite }, func(c *rdma.Chain) { c.CAS(0, 0x0909090909090909, 1) }, 1},
		"read only WRITE": {rdma.ReadOnly, func(c *conn) { c.as.Rights = rdma.ReadWrite },
			func(c *rdma.Chain) { c.Write(0, make([]byte, 8)) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			c, to := open(t, d, n.addr, ticket(3, 0, test.rights), 0)
			before := n.AccessErrors()
			test.forge(c)
			got := chain(to, guard, func(ch *rdma.Chain) { ch.Read(0, make([]byte, 8)); test.verb(ch); ch.Fenced() })
			require.ErrorIs(t, got.Err, rdma.ErrKey)
			require.Equal(t, test.done, got.Done)
			require.Equal(t, bytes.Repeat([]byte{9}, 64), n.Bytes(1)[:64])
			require.Eventually(t, func() bool { return n.AccessErrors() > before }, guard, time.Millisecond,
				"the node's queue pair dies too")
			require.NoError(t, chain(victim, guard, func(c *rdma.Chain) { c.Read(0, make([]byte, 8)) }).Err, "others go on")
		})
	}
}

// docs/DESIGN.md#sessions-and-fences: after a fence no byte changes, with as many WRITEs under way as fit.
func TestFenceWith256WritesUnderWay(t *testing.T) {
	t.Run("memory regions", func(t *testing.T) { fenceUnderWrites(t, WindowsOff) })
	t.Run("windows", func(t *testing.T) { fenceUnderWrites(t, WindowsOn) })
}

func fenceUnderWrites(t *testing.T, w Windows) {
	n := startNodeWith(t, testCluster, w)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	mem := n.Bytes(1)
	changed := 0
	const rounds = 20
	var took time.Duration
	for i := range rounds {
		c, to := open(t, d, n.addr, ticket(uint64(i+1), 0, rdma.ReadWrite), 0)
		require.NoError(t, chain(to, guard, func(c *rdma.Chain) { // a send queue for as many
			for range rdma.MaxChainVerbs {
				c.Read(0, make([]byte, 8))
			}
		}).Err)
		buf := bytes.Repeat([]byte{byte(i + 1)}, 4096)
		var r rdma.Round
		ch := r.Chain(to)
		for j := range rdma.MaxChainVerbs {
			ch.Write(uint64(j)*4096, buf)
		}
		c.Post(ch)
		for mem[0] != byte(i+1) { // the first has landed, the others are on their way
		}
		start := time.Now()
		require.NoError(t, n.Fence(t.Context(), uint64(i+1)))
		took += time.Since(start)
		after := bytes.Clone(mem[:1<<20])
		for range 3 {
			time.Sleep(2 * time.Millisecond) // gives what must not come a chance to come
			if !bytes.Equal(after, mem[:1<<20]) {
				changed++
				break
			}
		}
		r.Deadline = clock.In(guard)
		c.Wait(ch, r.Deadline)
		c.Close()
	}
	t.Logf("fences: %d, mean %v, bytes changed afterwards in %d", rounds, took/rounds, changed)
	require.Zero(t, changed)
}

// Settle ends whom the controller does not name, and admits nobody below but them.
func TestSettle(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	_, stays := open(t, d, n.addr, ticket(3, 0, rdma.ReadWrite), 0)
	_, goes := open(t, d, n.addr, ticket(4, 0, rdma.ReadWrite), 0)
	_, later := open(t, d, n.addr, ticket(9, 0, rdma.ReadWrite), 0)
	require.NoError(t, n.EndBelow(t.Context(), 8, []uint64{3}))
	add := func(c *rdma.Chain) { c.FetchAdd(0, 1) }
	require.NoError(t, chain(stays, guard, add).Err)
	require.NoError(t, chain(later, guard, add).Err)
	require.Error(t, chain(goes, guard, add).Err)
	require.ErrorIs(t, goes.Conn.Reset(t.Context()), rdma.ErrRevoked)
	_, err := d.Dial(t.Context(), n.addr, ticket(5, 0, rdma.ReadWrite), 0)
	require.ErrorIs(t, err, rdma.ErrRevoked)
	require.NoError(t, n.Fence(t.Context(), 3))
	_, err = d.Dial(t.Context(), n.addr, ticket(3, 0, rdma.ReadWrite), 0)
	require.ErrorIs(t, err, rdma.ErrRevoked)
}

// TestPeerProcess is no test: it is the node that other tests kill and stop.
func TestPeerProcess(t *testing.T) {
	if os.Getenv("VERBS_PEER") == "" {
		t.Skip("started by other tests")
	}
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	os.Stdout.WriteString("peer " + n.addr + "\n")
	io.Copy(io.Discard, os.Stdin)
}

func startPeer(t *testing.T) (*exec.Cmd, string) {
	needDevice(t)
	cmd := exec.Command(os.Args[0], "-test.run=^TestPeerProcess$")
	cmd.Env = append(os.Environ(), "VERBS_PEER=1")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { in.Close(); cmd.Process.Kill(); cmd.Wait() })
	var b [64]byte
	k, err := out.Read(b[:])
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(b[:k]), "\n")
	require.True(t, strings.HasPrefix(line, "peer "), line)
	return cmd, line[len("peer "):]
}

// A node that is killed is noticed within the bound of the retries.
func TestPeerKilled(t *testing.T) {
	cmd, addr := startPeer(t)
	d := newDialer(t)
	_, to := open(t, d, addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	require.NoError(t, cmd.Process.Kill())
	start := time.Now()
	for {
		c := chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) })
		if c.Err != nil {
			require.ErrorIs(t, c.Err, rdma.ErrBroken)
			break
		}
	}
	t.Logf("noticed after %v", time.Since(start))
	require.Less(t, time.Since(start), guard/2)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	require.ErrorIs(t, to.Conn.Reset(ctx), rdma.ErrBroken)
}

// A node whose process stands still serves one-sided verbs as before: none of its
// processor time is needed. What needs it (Reset) is bounded by its context.
func TestPeerStopped(t *testing.T) {
	cmd, addr := startPeer(t)
	d := newDialer(t)
	_, to := open(t, d, addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, teststop.Stop(cmd.Process.Pid))
	for i := range uint64(100) {
		c := chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) })
		require.NoError(t, c.Err)
		require.Equal(t, i, c.Verbs[0].Old)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, to.Conn.Reset(ctx), rdma.ErrBroken)
	require.NoError(t, cmd.Process.Signal(unix.SIGCONT))
	// The hello of the Reset that was given up may be read after this one's. It loses.
	require.NoError(t, to.Conn.Reset(t.Context()))
	for range 20 {
		require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	}
}

// Garbage instead of a hello, and peers that die in each phase of it.
func TestGarbageHello(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	spoil := func(at int, by byte) func([]byte) []byte {
		return func(good []byte) []byte { good[at] ^= by; return good }
	}
	for name, b := range map[string]func(good []byte) []byte{
		"nothing": func([]byte) []byte { return nil }, "half": func(good []byte) []byte { return good[:50] },
		"without hello": func(good []byte) []byte { return good[:introBytes] }, "magic": spoil(0, 'X'), "version": spoil(4, 99),
		"hello magic": spoil(introBytes, 'Q'), "hello version": spoil(introBytes+8, 99), "ticket": spoil(introBytes+70, 1), "proof": spoil(introBytes+host.HelloBytes-1, 1),
		"good, then gone": func(good []byte) []byte { return good }, "zeros": func([]byte) []byte { return make([]byte, 4096) },
	} {
		nc, err := net.Dial("tcp", n.addr)
		require.NoError(t, err)
		_, err = nc.Write(b(append(appendIntro(nil), rdmatest.Hello(t, nc, ticket(1, 0, rdma.ReadWrite), 0)...)))
		require.NoError(t, err, name)
		nc.(*net.TCPConn).CloseWrite() // fails where the node has closed already
		nc.SetReadDeadline(time.Now().Add(guard))
		io.Copy(io.Discard, nc)
		nc.Close()
	}
	require.Eventually(t, func() bool { return Live().QueuePairs == 0 }, guard, time.Millisecond, "queue pairs are left")
	d := newDialer(t)
	_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
}

// A node that answers with garbage, or not at all.
func TestGarbageWelcome(t *testing.T) {
	d := newDialer(t)
	for name, b := range map[string][]byte{"nothing": nil, "zeros": make([]byte, 72), "http": []byte(strings.Repeat("HTTP/1.1 400\r\n", 8))} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		go func() {
			if nc, err := l.Accept(); err == nil {
				nc.Write(b)
				nc.(*net.TCPConn).CloseWrite()
				io.Copy(io.Discard, nc)
				nc.Close()
			}
		}()
		_, err = d.Dial(t.Context(), l.Addr().String(), ticket(1, 0, rdma.ReadWrite), 0)
		require.ErrorIs(t, err, rdma.ErrBroken, name)
		l.Close()
	}
	require.Zero(t, Live().QueuePairs)
}

// Every verbs object is gone when its owner has been closed.
func TestNothingLeaks(t *testing.T) {
	needDevice(t)
	require.Equal(t, Objects{}, Live())
	var connecting time.Duration
	for range 5 {
		n := startNode(t, testCluster)
		require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
		d, err := NewDialer(Config{})
		require.NoError(t, err)
		for lane := range uint32(4) {
			c, err := d.Dial(t.Context(), n.addr, ticket(uint64(lane+1), 0, rdma.ReadWrite), lane)
			require.NoError(t, err)
			w, err := c.Open(t.Context(), 1, 1)
			require.NoError(t, err)
			to := &rdma.Target{Conn: c, Window: w}
			require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(0, make([]byte, 5000)) }).Err)
			start := time.Now()
			require.NoError(t, c.Reset(t.Context()))
			connecting += time.Since(start)
		}
		require.Equal(t, int64(8), Live().QueuePairs)
		require.Equal(t, int64(10), Live().ConnectionIDs, "both ends of four lanes, a listener, and the dialer's watch")
		require.Equal(t, int64(6), Live().EventChannels)
		require.NoError(t, d.Close())
		n.Stop()
		require.Equal(t, Objects{}, Live())
	}
	t.Logf("a lane is connected again in %v", connecting/20)
	t.Logf("verbs objects after tear-down: %+v", Live())
}

// Buffers of registered memory are used where they are, others are copied.
func TestBuffers(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	a := arena(t, d, 64<<20)
	_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	_, err := a.Alloc(pieceBytes - 4096)
	require.NoError(t, err)
	across, err := a.Alloc(1 << 20) // lies in two pieces
	require.NoError(t, err)
	across[0], across[1<<20-1] = 1, 2
	back, err := a.Alloc(1 << 20)
	require.NoError(t, err)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(0, across); c.Read(0, back) }).Err)
	require.True(t, bytes.Equal(across, back))
	require.Zero(t, d.Stats().Copied)
	require.LessOrEqual(t, d.Stats().Registered, uint64(4*pieceBytes), "only what is used is pinned")
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(0, make([]byte, 8)) }).Err)
	require.Equal(t, uint64(1), d.Stats().Copied)
	// The memory for copies grows with the largest chain.
	c := to.Conn.(*conn)
	require.Len(t, c.stage, stageLeast)
	for _, test := range []struct{ verbs, bytes, stage int }{{3, 100_000, 512 << 10}, {256, 1000, 512 << 10}, {1, 1 << 20, 1 << 20}, {4, 1 << 20, stageLeast << 4}, {256, 16 << 10, stageLeast << 4}} {
		out := make([][]byte, test.verbs)
		got := chain(to, guard, func(c *rdma.Chain) {
			for i := range out {
				out[i] = bytes.Repeat([]byte{byte(i + 1)}, test.bytes)
				c.Write(uint64(i%4)<<20, out[i])
			}
		})
		require.NoError(t, got.Err)
		require.Len(t, c.stage, test.stage)
		require.Equal(t, out[test.verbs-1], n.Bytes(1)[(test.verbs-1)%4<<20:][:test.bytes])
	}
	require.Error(t, d.Register(a.Bytes()), "twice")
}

// hugePages sets huge pages of 2 MiB aside for the test, and skips where that is impossible.
func hugePages(t *testing.T, pages int) {
	needDevice(t)
	f := "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
	before, err := os.ReadFile(f)
	if err != nil || os.WriteFile(f, []byte(strconv.Itoa(pages)), 0) != nil {
		t.Skip("needs root, and huge pages of 2 MiB")
	}
	t.Cleanup(func() { os.WriteFile(f, before, 0) })
}

// mountTmpfs mounts a tmpfs on a folder of the test.
func mountTmpfs(t *testing.T, dir string) {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Skipf("needs root to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
}

// Regions can lie on huge pages, and several are registered at a time.
func TestHugePages(t *testing.T) {
	const page, regions = 2 << 20, 3
	hugePages(t, 16)
	n := startNode(t, testCluster)
	d := newDialer(t)
	var all sync.WaitGroup
	errs := make([]error, regions)
	for i := range uint32(regions) {
		m, err := host.NewHugeMemory("test", 2*page, page)
		require.NoError(t, err)
		n.memories[i+1] = m
		all.Go(func() { errs[i] = n.Server.OpenRegion(t.Context(), i+1, 1, m) })
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	times, took := n.Registration()
	require.Equal(t, uint64(regions), times)
	require.Positive(t, took)
	_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	out := bytes.Repeat([]byte{3}, page)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(page/2, out[:1<<20]) }).Err)
	require.Equal(t, out[:1<<20], n.Bytes(1)[page/2:][:1<<20])
}

// Without a right to lock memory the error says what to do.
func TestMemlock(t *testing.T) {
	d := newDialer(t)
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chmod("/dev/infiniband/uverbs0", 0o666))
	}
	if asNobody(t, "TestMemlock") {
		return
	}
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}))
	a, err := rdma.NewArena(8 << 20)
	require.NoError(t, err)
	_, err = register(d.buffers.pd, a.Bytes(), 0, 1)
	require.ErrorIs(t, err, unix.ENOMEM)
	require.ErrorContains(t, err, "ulimit -l")
}

func TestNoDevice(t *testing.T) {
	needDevice(t)
	_, err := NewDialer(Config{Device: "mlx5_99"})
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, "mlx5_99")
	_, err = NewDialer(Config{Port: 7})
	require.ErrorIs(t, err, ErrDevice)
	all, err := Devices()
	require.NoError(t, err)
	require.NotEmpty(t, all)
	require.Equal(t, Objects{}, Live())
	t.Logf("%+v", all[0])
}

// Adapter atomics are exact among lanes, and see 8 bytes as little-endian words.
func TestLanesCount(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	var done atomic.Int64
	const lanes, each = 4, 300
	for i := range uint32(lanes) {
		_, to := open(t, d, n.addr, ticket(uint64(i+1), 0, rdma.ReadWrite), i)
		go func() {
			for range each {
				if chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err != nil {
					return
				}
			}
			done.Add(1)
		}()
	}
	require.Eventually(t, func() bool { return done.Load() == lanes }, guard, time.Millisecond)
	require.Equal(t, uint64(lanes*each), binary.LittleEndian.Uint64(n.Bytes(1)))
}
