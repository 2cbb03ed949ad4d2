package shm_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/verify/teststop"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// Clients of the tests below are processes of their own: this binary again.
func TestMain(m *testing.M) {
	if role := os.Getenv("QUARRY_TEST_CLIENT"); role != "" {
		os.Exit(client(role))
	}
	if path := os.Getenv("QUARRYTEST_SQUAT"); path != "" {
		squatter(path)
	}
	goleak.VerifyTestMain(m)
}

// squatter listens at a path until it is killed.
func squatter(path string) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		os.Exit(1)
	}
	_ = os.Chmod(path, 0o777)
	for {
		if _, err := l.Accept(); err != nil {
			os.Exit(1)
		}
	}
}

// cluster as rdmatest has it.
var cluster = rdmatest.Cluster{UUID: [16]byte{1, 2, 3}, Key: keyring.NewSigner([32]byte{4, 5, 6})}

// client writes at full rate, or counts, and says how it ended.
func client(role string) int {
	ctx := context.Background()
	rights := rdma.ReadWrite
	switch {
	case strings.HasPrefix(role, "raw-"):
		return hostile(role)
	case role == "heir":
		scribble(mapped(os.NewFile(3, "memory")))
	case role == wokenRole:
		woken(mapped(os.NewFile(3, "memory")))
	case role == echoRole:
		return echoNode()
	case role == callerRole:
		return caller()
	case role == "member":
		return member()
	case role == "unseen":
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return 1
		}
	case role == "read":
		rights = rdma.ReadOnly
	}
	c, err := shm.NewDialer().Dial(ctx, os.Getenv("QUARRY_TEST_ADDR"), cluster.Ticket(1, rights), uint32(os.Getpid()))
	if err != nil {
		fmt.Println("dial:", err)
		return 1
	}
	w, err := c.Open(ctx, 1, 1)
	if err != nil {
		fmt.Println("open:", err)
		return 1
	}
	if role == "read" {
		fmt.Println("opened:", reopen())
		return 0
	}
	to := &rdma.Target{Conn: c, Window: w}
	var r rdma.Round
	n := 0
	if role == "count" {
		for n = range 20_000 {
			r.Reset()
			r.Chain(to).FetchAdd(128, 1)
			rdma.Do(&r)
			if r.Err() != nil {
				break
			}
		}
		fmt.Println("counted", n+1, r.Err())
		return 0
	}
	buf := make([]byte, 1<<20)
	for ; r.Err() == nil; n++ {
		binary.LittleEndian.PutUint64(buf, uint64(n))
		buf[len(buf)-1] = byte(n)
		r.Reset()
		ch := r.Chain(to)
		ch.Write(0, buf)
		ch.Write(1<<20, buf)
		rdma.Do(&r)
		if n == 10 {
			fmt.Println("started")
		}
	}
	fmt.Println("ended:", r.Err())
	return 0
}

// reopen opens for writing what a node has sent for reading.
func reopen() error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "quarry-test") {
			at, _, _ := strings.Cut(line, " ")
			f, err := os.OpenFile("/proc/self/map_files/"+at, os.O_RDWR, 0)
			if err == nil {
				_, err = f.WriteAt([]byte("damaged"), 1<<20)
			}
			return err
		}
	}
	return errors.New("nothing is mapped")
}

type process struct {
	*exec.Cmd
	out *bufio.Reader
}

func spawn(t *testing.T, role, addr string) *process {
	cmd := exec.Command(os.Args[0], "-test.run=XXX")
	cmd.Env = append(os.Environ(), "QUARRY_TEST_CLIENT="+role, "QUARRY_TEST_ADDR="+addr)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return &process{cmd, bufio.NewReader(out)}
}

func (p *process) line(t *testing.T) string {
	s, err := p.out.ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(s)
}

func node(t testing.TB, limits host.Limits) (*host.Access, *host.Memory, string) {
	a := host.New(cluster.UUID, cluster.Ring(), 1, incarnations.Add(1), limits)
	m, err := host.NewMemory("test", 4<<20)
	require.NoError(t, err)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	addr, stop := serve(t, a)
	t.Cleanup(func() {
		stop()
		require.NoError(t, a.Close(context.Background()))
		require.NoError(t, m.Close())
	})
	return a, m, addr
}

// A process of the node's user could write what a read-only session has mapped, so that it is not sent
// the memory at all.
func TestReadOnlySessionsCannotWriteThroughProc(t *testing.T) {
	_, m, addr := node(t, host.Limits{})
	p := spawn(t, "read", addr)
	line := p.line(t)
	require.NotContains(t, string(m.Bytes()[1<<20:1<<20+7]), "damaged")
	require.Contains(t, line, "dial:")
	require.Error(t, p.Wait())
}

// A fenced client in another process is told, and lives.
func TestFenceOfAProcess(t *testing.T) {
	a, m, addr := node(t, host.Limits{})
	p := spawn(t, "write", addr)
	require.Equal(t, "started", p.line(t))
	require.NoError(t, a.Fence(t.Context(), 1))
	first := bytes.Clone(m.Bytes()[:2<<20])
	require.Equal(t, "ended: session is revoked", p.line(t))
	require.True(t, bytes.Equal(first, m.Bytes()[:2<<20]))
	require.NoError(t, p.Wait())
	require.Zero(t, a.Counters().Killed)
}

// HAZARDS, security 8 and docs/DESIGN.md#sessions-and-fences: a client that is stopped cannot give the memory
// up. It is killed, and the fence waits for its death.
func TestSecurity08_StoppedProcess(t *testing.T) {
	for range 4 {
		a, m, addr := node(t, host.Limits{KillAfter: soon})
		p := spawn(t, "write", addr)
		require.Equal(t, "started", p.line(t))
		require.NoError(t, teststop.Stop(p.Process.Pid))
		stopped(t, p.Process.Pid)
		untouched(t, m, func() error { return a.Fence(t.Context(), 1) })
		p.Process.Signal(unix.SIGCONT)
		p.killed(t)
		require.Empty(t, a.Sessions())
	}
}

// A client that is stopped in the middle of a chain is killed when keys rotate, and the change waits for its
// death. Stopped between chains it is harmless to a rotation, and lives.
func TestSecurity08_StoppedBesideARotation(t *testing.T) {
	killed, spared := 0, 0
	for i := 0; i < 40 && (killed == 0 || spared+killed < 4); i++ {
		a, m, addr := node(t, host.Limits{KillAfter: soon})
		p := spawn(t, "write", addr)
		require.Equal(t, "started", p.line(t))
		require.NoError(t, teststop.Stop(p.Process.Pid))
		stopped(t, p.Process.Pid)
		untouched(t, m, func() error { return a.CloseRegion(t.Context(), 1, 1) })
		first := bytes.Clone(m.Bytes()[:2<<20])
		p.Process.Signal(unix.SIGCONT)
		if a.Counters().Killed > 0 {
			killed++
			p.killed(t)
		} else {
			spared++
			require.Contains(t, p.line(t), "key")
			require.NoError(t, p.Wait())
		}
		require.True(t, bytes.Equal(first, m.Bytes()[:2<<20]), "a byte changed after the rotation")
	}
	require.Positive(t, killed, "no process was stopped inside a chain")
	t.Logf("killed %d, spared %d", killed, spared)
}

// stopped waits until every thread of a process stands.
func stopped(t *testing.T, pid int) {
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		require.NoError(t, err)
		all := true
		for _, path := range threads {
			b, _ := os.ReadFile(path)
			_, after, _ := strings.Cut(string(b), ") ")
			all = all && strings.HasPrefix(after, "T")
		}
		if all {
			return
		}
		require.True(t, time.Now().Before(end), "process does not stop")
	}
}

// A rotation too waits for a client that stands inside a chain; a kill -9 needs no help.
func TestKilledProcess(t *testing.T) {
	a, m, addr := node(t, host.Limits{})
	p := spawn(t, "write", addr)
	require.Equal(t, "started", p.line(t))
	require.NoError(t, p.Process.Kill())
	require.NoError(t, a.OpenRegion(t.Context(), 1, 2, m))
	first := bytes.Clone(m.Bytes()[:2<<20])
	p.Wait()
	require.True(t, bytes.Equal(first, m.Bytes()[:2<<20]))
	for end := time.Now().Add(time.Minute); len(a.Sessions()) > 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the lane of a dead process stays")
	}
}

// hazard 34: tcp, shm (here and in other processes) and inproc count on the same
// words without losing any: they share the atomicity domain of the CPUs.
func TestHazard34_OneDomain(t *testing.T) {
	a, m, addr := node(t, host.Limits{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := tcp.NewServer(a, nil)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	defer func() { s.Close(); require.NoError(t, <-served) }()
	inproc := shm.NewInproc()
	inproc.Add("here", a)
	var lanes []*rdma.Target
	for i := range uint32(2) {
		for d, at := range map[rdma.Dialer]string{shm.NewDialer(): addr, tcp.Dialer{}: l.Addr().String(), inproc: "here"} {
			c, err := d.Dial(t.Context(), at, cluster.Ticket(2, rdma.ReadWrite), uint32(len(lanes)))
			require.NoError(t, err, i)
			defer c.Close()
			w, err := c.Open(t.Context(), 1, 1)
			require.NoError(t, err)
			lanes = append(lanes, &rdma.Target{Conn: c, Window: w})
		}
	}
	others := []*process{spawn(t, "count", addr), spawn(t, "count", addr)}
	rdmatest.CountExactly(t, lanes, 400)
	for _, p := range others {
		require.Equal(t, "counted 20000 <nil>", p.line(t))
		require.NoError(t, p.Wait())
	}
	require.EqualValues(t, 40_000, binary.LittleEndian.Uint64(m.Bytes()[128:]))
	st := a.Sessions()
	for end := time.Now().Add(time.Minute); len(st) > 1; st = a.Sessions() {
		require.True(t, time.Now().Before(end), "the processes' sessions stay")
		time.Sleep(time.Millisecond)
	}
	require.Equal(t, map[string]int{"shm": 2, "tcp": 2, "inproc": 2}, st[0].Providers)
	require.Equal(t, []int{os.Getpid()}, st[0].Pids)
	require.Greater(t, a.Counters().Usage.Verbs, uint64(40_000))
}
