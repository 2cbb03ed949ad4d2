package cxl_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/verify/teststop"
)

var signer = keyring.NewSigner([32]byte{4, 5, 6})

var cluster = rdmatest.Cluster{UUID: [16]byte{1, 2, 3}, Key: signer}

// lane dials region 1 in a session, by an agent's socket.
func lane(ctx context.Context, socket string, serial, epoch uint64) (*rdma.Target, error) {
	return laneNumber(ctx, socket, serial, epoch, 0)
}

// laneNumber is lane for a lane of its own: a later connection with the same number ends an earlier one.
func laneNumber(ctx context.Context, socket string, serial, epoch uint64, number uint32) (*rdma.Target, error) {
	c, err := shm.NewDialer().Dial(ctx, socket, rdma.Issue(signer, rdma.Ticket{Cluster: cluster.UUID, Session: uint32(serial), Serial: serial, Rights: rdma.ReadWrite}), number)
	if err != nil {
		return nil, err
	}
	w, err := c.Open(ctx, 1, epoch)
	return &rdma.Target{Conn: c, Window: w}, err
}

// add increments a word.
func add(to *rdma.Target, off uint64) error {
	var r rdma.Round
	r.Chain(to).FetchAdd(off, 1)
	rdma.Do(&r)
	return r.At(0).Err
}

// clientEnv has the test binary be a client of another process: the agent's socket, and what it does with the memory.
const clientEnv = "QUARRY_TEST_CXL_CLIENT"

// client increments words of region 1 for ever, in session 1.
func client(spec string) error {
	socket, role, _ := strings.Cut(spec, " ")
	to, err := lane(context.Background(), socket, 1, 1)
	if err != nil {
		return err
	}
	fmt.Println("works")
	for {
		if err := add(to, 64); err != nil {
			fmt.Println("ended")
			if role == "member" {
				_, err := io.Copy(io.Discard, os.Stdin)
				return err
			}
			return err
		}
	}
}

type process struct {
	*exec.Cmd
	out *bufio.Reader
	in  io.Closer
}

func spawn(t *testing.T, socket, role string) *process {
	self, err := os.Executable()
	require.NoError(t, err)
	p := &process{Cmd: exec.Command(self)}
	p.Env = append(os.Environ(), clientEnv+"="+socket+" "+role)
	out, err := p.StdoutPipe()
	require.NoError(t, err)
	in, err := p.StdinPipe()
	require.NoError(t, err)
	p.Stderr, p.out, p.in = t.Output(), bufio.NewReader(out), in
	require.NoError(t, p.Start())
	t.Cleanup(func() { p.Process.Kill(); p.Wait() })
	line, err := p.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "works\n", line)
	return p
}

// halt stops the process.
func (p *process) halt(t *testing.T) { require.NoError(t, teststop.Stop(p.Process.Pid)) }

// still fails if a byte of region 1 changes.
func still(t *testing.T, n *node) {
	first := bytes.Clone(n.Bytes(1))
	for range 20 {
		time.Sleep(time.Millisecond) // gives what must not come a chance to come
		require.True(t, bytes.Equal(first, n.Bytes(1)), "a byte changed after the fence")
	}
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A fence by the node ends a process of the other host that does not give the memory up, and leaves one that does.
func TestFenceOnTheOtherHost(t *testing.T) {
	n := startNode(t, cluster, host.Limits{KillAfter: 30 * time.Millisecond})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	p := spawn(t, n.agent.socket, "stopped")
	p.halt(t)
	require.NoError(t, n.Fence(within(t, patience), 1))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	require.NoError(t, err)
	require.Contains(t, string(stat), ") Z ", "it is dead when the fence is done")
	still(t, n)
	err = p.Wait()
	require.Equal(t, syscall.SIGKILL, p.ProcessState.Sys().(syscall.WaitStatus).Signal(), "%v", err)

	_, err = lane(t.Context(), n.agent.socket, 1, 1)
	require.ErrorIs(t, err, rdma.ErrRevoked)
	n2 := startNode(t, cluster, host.Limits{})
	require.NoError(t, n2.OpenRegion(t.Context(), 0, 1, 1))
	p = spawn(t, n2.agent.socket, "member")
	require.NoError(t, n2.Fence(within(t, patience), 1))
	still(t, n2)
	line, err := p.out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ended\n", line)
	require.NoError(t, p.in.Close())
	require.NoError(t, p.Wait(), "it lives")
}

// While the other host's agent does not answer, no fence and no close of a region is said to be done. They are when the agent
// goes on, or when another one has taken its place.
func TestSilentAgent(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	to, err := lane(t.Context(), n.agent.socket, 1, 1)
	require.NoError(t, err)
	// The agent stands still, as one whose host hangs.
	n.agent.hangs(func() {
		err = n.CloseRegion(within(t, 100*time.Millisecond), 1, 1)
		require.ErrorContains(t, err, "host host-b, which maps the device, has not ended access")
		require.ErrorContains(t, err, "--host-gone host-b")
		require.ErrorIs(t, n.Fence(within(t, 100*time.Millisecond), 1), context.DeadlineExceeded)
		require.NoError(t, add(to, 64), "and the client goes on")
	})
	require.NoError(t, n.Fence(within(t, patience), 1))
	require.ErrorIs(t, add(to, 64), rdma.ErrRevoked)
	require.NoError(t, n.CloseRegion(within(t, patience), 1, 1))
}

// The node comes back. It does not begin before the clients that its predecessor had let onto the device have lost it; hosts that do not answer
// hold it up until the operator says that they are gone.
func TestHomeComesBack(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	to, err := lane(t.Context(), n.agent.socket, 1, 1)
	require.NoError(t, err)

	home := func(change func(*cxl.HomeConfig), within context.Context) (*cxl.Home, error) {
		c := cxl.HomeConfig{Host: "host-a", Incarnation: incarnations.Add(1), Keys: cluster.Ring(), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
		if change != nil {
			change(&c)
		}
		return cxl.NewHome(within, n.dev.home, c)
	}
	n.agent.hangs(func() {
		_, err = home(nil, within(t, 100*time.Millisecond))
		require.ErrorContains(t, err, "host host-b, which maps the device, has not ended access")
		_, err = home(func(c *cxl.HomeConfig) { c.Host = "host-c" }, within(t, patience))
		require.ErrorContains(t, err, "a storage node on host host-a serves it: stop that node; if that host is off for good, say so: --host-gone host-a")
		require.NoError(t, add(to, 64), "nothing was taken from the client")
	})

	h, err := home(nil, within(t, patience))
	require.NoError(t, err)
	require.ErrorIs(t, add(to, 64), rdma.ErrBroken, "an earlier incarnation's")
	require.NoError(t, h.Begin(within(t, patience), cluster.UUID, 1))
	require.Len(t, h.Endpoints(), 1, "the host is there still")
	_, err = lane(t.Context(), n.agent.socket, 1, 1)
	require.Error(t, err, "no region is open")
	require.NoError(t, h.OpenRegion(within(t, patience), 1, 1, 0, rdmatest.RegionBytes, 0))
	to, err = lane(t.Context(), n.agent.socket, 1, 1)
	require.NoError(t, err)
	require.NoError(t, add(to, 64))
	require.NoError(t, h.Close(within(t, patience)))
	require.ErrorIs(t, add(to, 64), rdma.ErrBroken)

	// The operator's word, about a host that is really off here: its agent would go on otherwise.
	n.agent.kill(t)
	h, err = home(func(c *cxl.HomeConfig) { c.Forget = []string{"host-b"} }, within(t, patience))
	require.NoError(t, err)
	require.Empty(t, h.Endpoints())
	require.NoError(t, h.Close(within(t, patience)))
}

// An agent that has died holds fences up until another one of its host has the device's lock, which the clients that it has left behind
// hold as well.
func TestAgentIsReplaced(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	require.NoError(t, n.Fence(within(t, patience), 3))
	n.agent.kill(t)
	require.ErrorIs(t, n.Fence(within(t, 50*time.Millisecond), 1), context.DeadlineExceeded)
	n.agent = startAgent(t, n.dev, host.Limits{}, nil)
	require.NoError(t, n.Fence(within(t, patience), 1))
	require.Eventually(t, func() bool { return len(n.home.Endpoints()) == 1 }, patience, time.Millisecond)
	for _, serial := range []uint64{1, 3} {
		_, err := lane(t.Context(), n.agent.socket, serial, 1)
		require.ErrorIs(t, err, rdma.ErrRevoked, "the newcomer knows which sessions were fenced")
	}
	to, err := lane(t.Context(), n.agent.socket, 2, 1)
	require.NoError(t, err, "and what is open")
	require.NoError(t, add(to, 64))
	n.agent.end(t)
	require.Eventually(t, func() bool { return len(n.home.Endpoints()) == 0 }, patience, time.Millisecond)
	require.NoError(t, n.Fence(within(t, patience), 2), "a host that has left holds nothing up")
}

// An agent whose board is gone, or whose slot was given away, ends all access.
func TestBoardIsGone(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	to, err := lane(t.Context(), n.agent.socket, 1, 1)
	require.NoError(t, err)
	_, err = n.dev.home.File.WriteAt(make([]byte, 8), deviceBytes-6<<20)
	require.NoError(t, err)
	require.ErrorContains(t, <-n.agent.ended, "the board does not have this agent any more")
	require.ErrorIs(t, add(to, 64), rdma.ErrBroken)
	n.agent.dead.Store(true) // for Stop
}

// A host to which the memory is not coherent is not let in, and may try again.
func TestIncoherentHostIsRefused(t *testing.T) {
	dev := newDevice(t)
	var log bytes.Buffer
	h, err := newHome(t, dev, cluster, incarnations.Add(1), func(c *cxl.HomeConfig) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	require.NoError(t, err)
	end := cxl.FailingLitmus()
	d := dev.other(t)
	_, err = cxl.NewAgent(within(t, patience), d, cxl.AgentConfig{Host: "host-b", BootID: "b", Socket: "/tmp/s", Log: slog.New(slog.DiscardHandler)})
	require.ErrorIs(t, err, cxl.ErrIncoherent)
	require.ErrorContains(t, err, "must not carry Quarry")
	end()
	require.NoError(t, d.File.Close())
	a := startAgent(t, dev, host.Limits{}, nil)
	require.Eventually(t, func() bool { return len(h.Endpoints()) == 1 }, patience, time.Millisecond)
	a.end(t)
	require.NoError(t, h.Close(within(t, patience)))
	require.Contains(t, log.String(), "a host may not map the device")
}

// A second host with the name of one that works is refused, also while that one is busy with a command, and the first goes on.
func TestTwoHostsOfOneName(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	f, err := os.OpenFile(n.dev.path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	twin := *n.dev.home
	twin.File = f // another host's kernel knows nothing of the first one's lock
	join := func(machine string) error {
		a, err := cxl.NewAgent(within(t, 15*time.Second), &twin, cxl.AgentConfig{Host: "host-b", BootID: "c", MachineID: machine, Socket: "/tmp/s", Log: slog.New(slog.DiscardHandler)})
		if err == nil { // let in, which the test fails for: the node's end does not wait for it
			over, end := context.WithCancel(t.Context())
			end()
			require.NoError(t, a.Serve(over))
		}
		return err
	}
	const other, copied = "nothing shows that it was this machine", "with the machine id of this one"
	require.ErrorContains(t, join("machine-c"), other)
	require.ErrorContains(t, join(""), other)
	require.ErrorContains(t, join("machine-b"), copied)
	began, leave := n.agent.stall()
	goOn := sync.OnceFunc(func() { close(leave) })
	defer goOn() // also where the test fails: the node's end waits for the agent
	fenced := make(chan error, 1)
	go func() { fenced <- n.Fence(within(t, patience), 2) }()
	<-began
	require.ErrorContains(t, join("machine-b"), copied, "the agent is busy")
	require.ErrorContains(t, join("machine-c"), other)
	goOn()
	require.NoError(t, <-fenced)
	to, err := lane(t.Context(), n.agent.socket, 1, 1)
	require.NoError(t, err)
	require.NoError(t, add(to, 64))
	require.NoError(t, n.Fence(within(t, patience), 1))
}

// A machine that was started anew goes on in the slot that it had: the end of its kernel was that of its clients.
func TestMachineIsRestarted(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.OpenRegion(t.Context(), 0, 1, 1))
	n.agent.kill(t)
	require.ErrorIs(t, n.Fence(within(t, 50*time.Millisecond), 1), context.DeadlineExceeded)
	n.dev.boot = "another boot"
	n.agent = startAgent(t, n.dev, host.Limits{}, nil)
	require.NoError(t, n.Fence(within(t, patience), 1))
}

// Fences and closed regions are complete before Begin, although the members serve no incarnation then. Begin gives the members those fences.
func TestCommandsBeforeTheBeginning(t *testing.T) {
	n := startNode(t, cluster, host.Limits{})
	require.NoError(t, n.home.Die())
	h, err := cxl.NewHome(within(t, patience), n.dev.home, cxl.HomeConfig{Host: "host-a", Incarnation: incarnations.Add(1), Keys: cluster.Ring(), Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	n.home = h
	require.NoError(t, h.Fence(within(t, patience), 1))
	require.NoError(t, h.CloseRegion(within(t, patience), 0, 3))
	require.NoError(t, h.Begin(within(t, patience), cluster.UUID, 1))
	_, err = lane(t.Context(), n.agent.socket, 1, 1)
	require.ErrorIs(t, err, rdma.ErrRevoked)
}

// NewHome refuses an empty name and one that does not fit the board: the next start would not recognize its own board.
func TestNamesOfHomes(t *testing.T) {
	dev := newDevice(t)
	for _, name := range []string{"", strings.Repeat("h", 65)} {
		_, err := newHome(t, dev, cluster, incarnations.Add(1), func(c *cxl.HomeConfig) { c.Host = name })
		require.ErrorContains(t, err, "want a name of 1 to 64 bytes")
	}
	for range 2 {
		h, err := newHome(t, dev, cluster, incarnations.Add(1), func(c *cxl.HomeConfig) { c.Host = strings.Repeat("h", 64) })
		require.NoError(t, err)
		require.NoError(t, h.Die())
	}
}

func TestAgentsAreRefused(t *testing.T) {
	dev := newDevice(t)
	join := func(change func(*cxl.AgentConfig)) error {
		d := dev.other(t)
		defer d.File.Close()
		c := cxl.AgentConfig{Host: "host-b", Socket: "/tmp/s", Log: slog.New(slog.DiscardHandler)}
		change(&c)
		_, err := cxl.NewAgent(within(t, 50*time.Millisecond), d, c)
		return err
	}
	require.ErrorContains(t, join(func(*cxl.AgentConfig) {}), "holds no board for several hosts")
	_, err := newHome(t, dev, cluster, 1, func(c *cxl.HomeConfig) { c.Format = false })
	require.ErrorContains(t, err, "holds no board for several hosts")
	// A home that lets no one in, for it has not begun.
	h, err := cxl.NewHome(t.Context(), dev.home, cxl.HomeConfig{Host: "host-a", Format: true, Incarnation: 1, Keys: cluster.Ring(), Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.ErrorContains(t, join(func(c *cxl.AgentConfig) { c.Host = "host-a" }), "the storage node itself runs on host host-a")
	require.ErrorContains(t, join(func(c *cxl.AgentConfig) { c.Host = "" }), "want a name of")
	err = join(func(*cxl.AgentConfig) {})
	require.ErrorContains(t, err, "waiting for the storage node that owns the device")
	require.True(t, errors.Is(err, context.DeadlineExceeded))
	require.NoError(t, h.Close(t.Context()))
}
