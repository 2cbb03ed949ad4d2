package client_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testbinary"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// railsReport is what the process in the client's namespace has seen.
type railsReport struct {
	Writes uint64 // acknowledged
	Faults []string
	Events client.Events
}

// railsLoad has a writer for each of four objects, until standard input ends. Then every object must hold what was acknowledged last. For
// each line of input it prints one when every writer has had 100 more writes acknowledged, and a watch has delivered one of these of the first.
func railsLoad(url string) error {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{url}, Rails: strings.Split(os.Getenv("QUARRY_TEST_RAIL"), ","), RailPolicy: client.RailsStrict,
		Transport: client.TransportTCP, Replicas: 2, Lanes: 4})
	if err != nil {
		return err
	}
	defer c.Close()
	var report railsReport
	var mu sync.Mutex // of report.Faults
	fault := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		report.Faults = append(report.Faults, fmt.Sprintf(format, args...))
	}
	faulty := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(report.Faults) > 0
	}
	var done atomic.Bool
	var writes [4]atomic.Uint64
	var watched atomic.Uint64 // newest write of writer 0 that the watch has delivered
	watching, endWatch := context.WithCancel(ctx)
	defer endWatch()
	var wg sync.WaitGroup
	for w := range 4 {
		ref, err := c.Alloc(ctx, binary.LittleEndian.AppendUint64(nil, 0), client.AllocOptions{})
		if err != nil {
			return err
		}
		if w == 0 {
			watch, err := c.Watch(ctx, ref)
			if err != nil {
				return err
			}
			defer watch.Close()
			wg.Go(func() {
				for watching.Err() == nil {
					if b, _, err := watch.Next(watching, nil); err == nil {
						watched.Store(binary.LittleEndian.Uint64(b))
					} else if watching.Err() == nil {
						fault("watch: %v", err)
						return
					}
				}
			})
		}
		wg.Go(func() {
			var last uint64
			for n := uint64(1); !done.Load(); n++ {
				if err := c.Write(ctx, ref, binary.LittleEndian.AppendUint64(nil, n)); err != nil {
					fault("write %d of writer %d: %v", n, w, err)
					return
				}
				last = n
				writes[w].Store(n)
				time.Sleep(time.Millisecond) // what counts is the cut, not the number of writes
			}
			if b, err := c.Read(ctx, ref, nil); err != nil || binary.LittleEndian.Uint64(b) != last {
				fault("writer %d: %x is read, %d was acknowledged last: %v", w, b, last, err)
			}
		})
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		told := writes[0].Load() + 100
		for i := range writes {
			for want := writes[i].Load() + 100; writes[i].Load() < want && !faulty(); {
				time.Sleep(time.Millisecond)
			}
		}
		for watched.Load() < told && !faulty() {
			time.Sleep(time.Millisecond)
		}
		fmt.Println("progress")
	}
	done.Store(true)
	endWatch()
	wg.Wait()
	for i := range writes {
		report.Writes += writes[i].Load()
	}
	report.Events = c.Stats().Events
	return json.NewEncoder(os.Stdout).Encode(report)
}

// namespaces are two hosts, of nodes (n) and of a client (c), with three networks between them: 10.79.0 for control, .1 and .2 are rails.
type namespaces struct {
	t    *testing.T
	n, c string
}

func newNamespaces(t *testing.T) *namespaces {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("the ip tool is missing (package iproute2)")
	}
	s := &namespaces{t, fmt.Sprintf("qrails%d-n", os.Getpid()), fmt.Sprintf("qrails%d-c", os.Getpid())}
	for _, ns := range []string{s.n, s.c} {
		if out, err := exec.Command("ip", "netns", "add", ns).CombinedOutput(); err != nil {
			t.Skipf("no network namespaces here: %s", out)
		}
		t.Cleanup(func() { exec.Command("ip", "netns", "del", ns).Run() })
		s.ip("-n", ns, "link", "set", "lo", "up")
	}
	for i := range 3 {
		link := fmt.Sprintf("rail%d", i)
		s.ip("-n", s.n, "link", "add", link, "type", "veth", "peer", "name", link, "netns", s.c)
		for host, ns := range []string{s.c, s.n} {
			s.ip("-n", ns, "addr", "add", fmt.Sprintf("10.79.%d.%d/24", i, host+1), "dev", link)
			s.ip("-n", ns, "link", "set", link, "up")
		}
	}
	return s
}

func (s *namespaces) ip(args ...string) {
	s.t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	require.NoError(s.t, err, "ip %q: %s", args, out)
}

// start runs a program in a namespace and waits for its first line.
func (s *namespaces) start(ns string, args ...string) {
	s.t.Helper()
	cmd := exec.Command("ip", append([]string{"netns", "exec", ns}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, cmd.Start())
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(s.t, err, "%q has not come up", args)
}

// epochs are the regions' numbers and epochs, by quarry status.
func (s *namespaces) epochs(program, url string) map[uint32]uint64 {
	s.t.Helper()
	out, err := exec.Command("ip", "netns", "exec", s.n, program, "status", "--json", "-C", url).Output()
	require.NoError(s.t, err)
	var v struct {
		Regions []struct {
			ID        uint32 `json:"id"`
			Epoch     uint64 `json:"epoch"`
			Condition string `json:"condition"`
		} `json:"regions"`
	}
	require.NoError(s.t, json.Unmarshal(out, &v))
	require.NotEmpty(s.t, v.Regions, "%s", out)
	all := map[uint32]uint64{}
	for _, r := range v.Regions {
		all[r.ID] = r.Epoch
	}
	return all
}

// TestHazard191_RailIsCut: nodes and a client have two rails. One is cut, and later, with the first one back, the other one. Calls go on
// by the rail that is left: none fails, no acknowledged write is lost, and no region gets another epoch.
func TestHazard191_RailIsCut(t *testing.T) {
	s := newNamespaces(t)
	program := filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")
	const url = "http://10.79.0.2:7420"
	s.start(s.n, program, "controller", "--insecure", "--data", t.TempDir(), "--listen", "10.79.0.2:7420")
	for i := range 2 {
		s.start(s.n, program, "storage", "--insecure", "-C", url, "--fabric", "tcp", "--name", fmt.Sprint("node-", i), "--capacity", "1GiB", "--socket", "none",
			"--listen", fmt.Sprintf("a=10.79.1.2:%d,b=10.79.2.2:%d", 7430+i, 7430+i), "--agent", fmt.Sprintf("10.79.0.2:%d", 7440+i))
	}

	load := exec.Command("ip", "netns", "exec", s.c, os.Args[0])
	load.Env = append(os.Environ(), "QUARRY_TEST_RAILS="+url, "QUARRY_TEST_RAIL=a=10.79.1.1,b=10.79.2.1")
	load.Stderr = os.Stderr
	in, err := load.StdinPipe()
	require.NoError(t, err)
	out, err := load.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, load.Start())
	defer func() { load.Process.Kill(); load.Wait() }()
	hung := time.AfterFunc(3*time.Minute, func() { load.Process.Kill() })
	defer hung.Stop()
	lines := bufio.NewScanner(out)
	progress := func() { // of every writer
		t.Helper()
		_, err := fmt.Fprintln(in)
		require.NoError(t, err)
		require.True(t, lines.Scan(), "the load has ended")
	}
	progress()
	before := s.epochs(program, url)
	s.ip("-n", s.n, "link", "set", "rail1", "down")
	progress()
	s.ip("-n", s.n, "link", "set", "rail1", "up")
	s.ip("-n", s.n, "link", "set", "rail2", "down")
	progress()
	require.NoError(t, in.Close())
	var report railsReport
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "{") {
			require.NoError(t, json.Unmarshal(lines.Bytes(), &report))
		}
	}
	require.Empty(t, report.Faults)
	require.NotZero(t, report.Writes)
	require.Equal(t, before, s.epochs(program, url), "a rail was taken for a node")
	require.GreaterOrEqual(t, report.Events.RailFailures, uint64(2))
	require.Zero(t, report.Events.Crossings)
	t.Logf("%d writes, %+v", report.Writes, report.Events)
}

// TestRailPolicy: a client on another rail than the node is refused with RailsStrict and warned with RailsWarn.
func TestRailPolicy(t *testing.T) {
	for _, bad := range []client.Config{{Rails: []string{"a b"}}, {Rails: []string{"a=x"}}, {RailPolicy: "a"}} {
		bad.Controllers = []string{"http://127.0.0.1:1"}
		_, err := client.Connect(t.Context(), bad)
		require.ErrorIs(t, err, client.ErrArgument)
	}
	c := testcluster.New(t, testcluster.Options{Listen: "a=127.0.0.1:0,b=127.0.0.2:0"})
	for _, x := range []struct {
		rails  []string
		policy string
		cross  bool
		fails  bool
	}{
		{nil, client.RailsStrict, false, false},
		{[]string{"b=127.0.0.3"}, client.RailsStrict, false, false},
		{[]string{"c"}, client.RailsWarn, true, false},
		{[]string{"c"}, client.RailsStrict, false, true},
	} {
		cl := c.Connect(client.Config{Rails: x.rails, RailPolicy: x.policy, Transport: client.TransportTCP})
		_, err := cl.Alloc(t.Context(), []byte("x"), client.AllocOptions{})
		if x.fails {
			require.ErrorIs(t, err, client.ErrUnreachable)
			require.ErrorContains(t, err, "this process is on c, the node on a, b")
			require.False(t, errors.Is(err, context.DeadlineExceeded), "it is refused at once: %v", err)
		} else {
			require.NoError(t, err)
		}
		require.Equal(t, x.cross, cl.Stats().Events.Crossings > 0, "%v", x)
	}
}
