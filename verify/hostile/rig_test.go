package hostile

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/verify/testbinary"
)

const (
	token    = "canary-of-the-cluster"
	patience = 3 * time.Minute
	// connections is how many connections an attack makes.
	connections = 10_000
	// most is what an attack may add to the memory of a process: some 40 MiB that it needs, and what the collector of garbage has not freed on a busy machine.
	most = 96 << 20
)

// process is a started quarry.
type process struct {
	t   *testing.T
	cmd *exec.Cmd
	// ready is the line of JSON with which it says that it serves.
	ready map[string]string
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	cmd := exec.Command(filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry"), append(args, "--json", "--token", token)...)
	cmd.Env = append(os.Environ(), "QUARRY_CONFIG=")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = testLog{t}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	p := &process{t: t, cmd: cmd, ready: map[string]string{}}
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan(), "%v says nothing: %v", args, lines.Err())
	require.NoError(t, json.Unmarshal(lines.Bytes(), &p.ready), "%s", lines.Text())
	return p
}

type testLog struct{ t *testing.T }

func (l testLog) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// peak is the largest resident memory since the last reset, in bytes.
func (p *process) peak() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	for line := range strings.Lines(string(b)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kib), "kB")))
			require.NoError(p.t, err)
			return n << 10
		}
	}
	p.t.Fatal("no VmHWM")
	return 0
}

// growth is what attack adds to the resident memory at its highest. What the process has
// in use before is measured after it has done what attacks have it do first.
func (p *process) growth(attack func()) int {
	p.t.Helper()
	require.NoError(p.t, os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.cmd.Process.Pid), []byte("5"), 0))
	before := p.peak()
	attack()
	grown := p.peak() - before
	p.t.Logf("resident memory before %.1f MiB, at most %.1f MiB more under attack", float64(before)/(1<<20), float64(grown)/(1<<20))
	return grown
}

func (p *process) url() string { return p.ready["url"] }

// status asks with the token, over a connection of its own.
func (p *process) status() *quarrypb.StatusResponse {
	p.t.Helper()
	h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	res, err := quarrypbconnect.NewControllerClient(h, p.url(), connect.WithInterceptors(agentauth.Token(token))).Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
	require.NoError(p.t, err)
	return res.Msg
}

// crowd opens connections, says the greeting on each, and leaves them open until the test
// ends. A connection that the process closes is not opened again.
func crowd(t *testing.T, address string, n int, greeting string) {
	t.Helper()
	var all []net.Conn
	t.Cleanup(func() {
		for _, c := range all {
			c.Close()
		}
	})
	for range n {
		c, err := net.Dial("tcp", address)
		if err != nil {
			continue // refused: that is one way to stay within bounds
		}
		_, _ = c.Write([]byte(greeting)) // it may be closed already
		all = append(all, c)
	}
	require.Greater(t, len(all), n/2, "the attack could not be made: is the limit of open files too low?")
}

func hostOf(url string) string {
	_, host, _ := strings.Cut(url, "://")
	return host
}

// run runs quarry with the token to its end.
func (p *process) run(args ...string) {
	p.t.Helper()
	cmd := exec.Command(filepath.Join(testbinary.Build(p.t, "./cmd/quarry"), "quarry"), args...)
	cmd.Env = append(os.Environ(), "QUARRY_CONFIG=", "QUARRY_TOKEN="+token)
	out, err := cmd.CombinedOutput()
	require.NoError(p.t, err, "%v: %s", args, out)
}
