package shm_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
)

const (
	// echoRole is a node, callerRole a client that calls once and then waits.
	echoRole, callerRole = "echo-node", "caller"
	// endless never returns.
	endless = 100
)

// echoNode is a node without regions in a process of its own, until its input ends.
func echoNode() int {
	a := host.New(cluster.UUID, cluster.Ring(), 1, 1, host.Limits{})
	a.Handle(endless, func(*rdma.Ticket, []byte, []byte) (int, error) {
		fmt.Println("entered")
		select {}
	})
	l, err := shm.Listen(os.Getenv("QUARRY_TEST_ADDR"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	s := shm.NewServer(a, nil)
	go s.Serve(l)
	fmt.Println("serves")
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Close()
	a.Close(context.Background())
	return 0
}

// startEchoNode starts one; its lines are read from out.
func startEchoNode(t testing.TB) (addr string, cmd *exec.Cmd, out *bufio.Reader) {
	addr = filepath.Join(t.TempDir(), "s")
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "QUARRY_TEST_CLIENT="+echoRole, "QUARRY_TEST_ADDR="+addr)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	out = bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "serves\n", line)
	return addr, cmd, out
}

// caller calls a node once, and waits until it is killed.
func caller() int {
	ctx := context.Background()
	conn, err := shm.NewDialer().Dial(ctx, os.Getenv("QUARRY_TEST_ADDR"), cluster.Ticket(1, rdma.ReadWrite), 0)
	if err != nil {
		fmt.Println("dial:", err)
		return 1
	}
	arena, err := rdma.NewArena(msg.BufferBytes)
	if err != nil {
		return 1
	}
	c, err := msg.Open(ctx, conn, arena)
	if err == nil {
		_, err = c.Call(ctx, msg.Echo, nil, nil)
	}
	fmt.Println("called", err)
	select {}
}

// A client whose thread sleeps learns of the death of its node, and a node of that of a client on whose word its thread sleeps.
func TestHazard317_DeathBesideASleep(t *testing.T) {
	addr, node1, out := startEchoNode(t)
	conn, err := shm.NewDialer().Dial(t.Context(), addr, cluster.Ticket(1, rdma.ReadWrite), 0)
	require.NoError(t, err)
	defer conn.Close()
	c, err := msg.Open(t.Context(), conn, buffers(t))
	require.NoError(t, err)
	c.Once = true
	ended := make(chan error, 1)
	go func() {
		_, err := c.Call(context.Background(), endless, nil, nil)
		ended <- err
	}()
	_, err = out.ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, node1.Process.Kill())
	require.ErrorIs(t, <-ended, msg.ErrUnknown)

	a, _, addr := node(t, host.Limits{})
	p := spawn(t, callerRole, addr)
	require.Equal(t, "called <nil>", p.line(t))
	require.NoError(t, p.Process.Kill())
	for end := time.Now().Add(time.Minute); len(a.Sessions()) > 0; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "the lane of a dead process stays")
	}
}

func buffers(t testing.TB) rdma.Buffers {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	t.Cleanup(func() { arena.Close() })
	return arena
}
