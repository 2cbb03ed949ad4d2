package storagenode_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
)

// asNode makes the test binary a storage node of the controller it names.
const asNode = "QUARRY_TEST_AS_NODE"

func TestMain(m *testing.M) {
	if url := os.Getenv(asNode); url != "" {
		dir := ""
		if len(os.Args) > 1 {
			dir = os.Args[1]
		}
		if err := beNode(url, dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// beNode runs a node until SIGTERM; it prints its Stats once it is registered.
func beNode(url, dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	n, err := storagenode.Start(ctx, storagenode.Config{Controllers: []string{url}, Name: "n1", Dir: dir, Logger: quiet()})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(n.Stats()); err != nil {
		return err
	}
	<-ctx.Done()
	return n.Close()
}

// process is a node in a process of its own.
type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	stats storagenode.Stats
}

func (b *boss) spawn(t *testing.T, dir string) *process {
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), asNode+"="+b.url, "TMPDIR="+t.TempDir())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p := &process{t: t, cmd: cmd}
	t.Cleanup(func() { p.end(syscall.SIGKILL) })
	line, err := bufio.NewReader(out).ReadBytes('\n')
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(line, &p.stats))
	return p
}

// end stops the process and says how it ended.
func (p *process) end(s syscall.Signal) error {
	if p.cmd.ProcessState != nil {
		return nil
	}
	p.cmd.Process.Signal(s)
	return p.cmd.Wait()
}

func (p *process) rssBytes() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[0] == "VmRSS:" {
			kb, err := strconv.Atoi(f[1])
			require.NoError(p.t, err)
			return kb << 10
		}
	}
	p.t.Fatal("no VmRSS")
	return 0
}

// TestMemoryIsRegionsAndLittleMore: DESIGN promises at most 60 MiB beside regions. Of those
// all pages are there from the beginning.
func TestMemoryIsRegionsAndLittleMore(t *testing.T) {
	b := newBoss(t)
	p := b.spawn(t, "")
	req := b.hostReq(1, 1)
	req.SizeBytes = 256 << 20
	a := b.agentAt(p.stats.Agent)
	require.Zero(t, call(t, a.HostRegion, req))
	require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 1, ControllerTerm: 1}))
	c, err := b.dial(tcp.Dialer{}, p.stats.TCP, 1, 0, 1, 1)
	require.NoError(t, err)
	const touched = 128 << 20
	c.buf = make([]byte, 1<<20)
	for off := uint64(0); off < touched; off += 1 << 20 {
		require.NoError(t, c.write(64<<20+off, 1))
	}
	rss := p.rssBytes()
	t.Logf("rss %d MiB with %d MiB touched of a region of 256 MiB", rss>>20, touched>>20)
	if raceEnabled {
		t.Log("the race detector has memory of its own: no bound")
	} else {
		require.Less(t, rss, touched+60<<20)
	}
	eventually(t, "the heartbeat tells", func() (ok bool) {
		b.with(func() { ok = b.resident == req.SizeBytes })
		return ok
	})
	require.NoError(t, p.end(syscall.SIGTERM), "it ends in good order")
}

// TestHazard14_KilledNodeRemembers: kill -9 at any time loses neither the term nor
// fences nor epochs.
func TestHazard14_KilledNodeRemembers(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	for incarnation := range uint64(5) {
		term := incarnation + 1
		p := b.spawn(t, dir)
		a := b.agentAt(p.stats.Agent)
		require.Zero(t, call(t, a.HostRegion, b.hostReq(term, 1)))
		if incarnation > 0 {
			require.NotZero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 10 * incarnation, ControllerTerm: term}), "an epoch of a former incarnation")
			require.NotZero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 100, ControllerTerm: term - 1}), "a former term")
		}
		require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 10*incarnation + 10, ControllerTerm: term}))
		for serial := uint64(1); serial <= incarnation; serial++ {
			_, err := b.dial(tcp.Dialer{}, p.stats.TCP, serial, 0, 1, 10*incarnation+10)
			require.Error(t, err, "fenced in a former incarnation")
		}
		require.Zero(t, call(t, a.Fence, &quarrypb.FenceRequest{Serials: []uint64{term}, ControllerTerm: term}))
		require.Error(t, p.end(syscall.SIGKILL))
		b.with(func() { b.answer.ControllerTerm = term })
	}
}
