package vmm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/uffd"
	"github.com/quarrystore/quarry/verify/testbinary"
	"golang.org/x/sys/unix"
)

const (
	mib  = 1 << 20
	page = vmm.PageBytes
	// patience bounds the wait for what must come.
	patience = 3 * time.Minute
)

// asProgram has this test binary run one of programs in place of the tests: a process that maps a space.
const asProgram = "QUARRYTEST_VMM"

var programs = map[string]func(p *program) error{}

func TestMain(m *testing.M) {
	name := os.Getenv(asProgram)
	if name == "" {
		os.Exit(m.Run())
	}
	if err := runProgram(name); err != nil {
		fmt.Fprintln(os.Stderr, "program "+name+":", err)
		os.Exit(1)
	}
}

// program is a process of a test: standard input has lines of the test, standard output lines for it.
type program struct {
	ctx  context.Context
	s    *space.Space
	o    vmm.Options
	args []string
	in   *bufio.Reader
}

func runProgram(name string) error {
	ctx := context.Background()
	cfg, err := client.ConfigFromEnvironment()
	if err != nil {
		return err
	}
	cfg.Timeout = patience
	c, err := client.Connect(ctx, cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	args := strings.Fields(os.Getenv(asProgram + "_ARGS"))
	s, err := space.Open(ctx, c, args[0])
	if err != nil {
		return err
	}
	return programs[name](&program{ctx, s, vmm.Options{Socket: args[1], Command: []string{}}, args[2:], bufio.NewReader(os.Stdin)})
}

// mapAll maps the whole space.
func (p *program) mapAll() (*vmm.Mapping, error) {
	return vmm.Map(p.ctx, p.s, p.s.Base(), p.s.Bytes(), vmm.Release, p.o)
}

// say prints a line, and hear waits for one.
func (p *program) say(line string) { fmt.Println(line) }

func (p *program) hear() string {
	line, err := p.in.ReadString('\n')
	if err != nil {
		return ""
	}
	return strings.TrimSpace(line)
}

// arg is argument i as a number.
func (p *program) arg(i int) int {
	n, err := strconv.Atoi(p.args[i])
	if err != nil {
		panic(err)
	}
	return n
}

// kit is a cluster of processes.
type kit struct {
	testing.TB
	quarry  string
	cluster *local.Cluster
	c       *client.Client
}

func newKit(t testing.TB, nodes int) *kit {
	fd, _, err := uffd.Open()
	if err != nil {
		t.Skip("page faults cannot be served here: ", err)
	}
	unix.Close(fd)
	k := &kit{TB: t, quarry: filepath.Join(testbinary.Build(t, "./cmd/quarry", "./examples/..."), "quarry")}
	k.cluster, err = local.Start(t.Context(), local.Config{Binary: k.quarry, Nodes: nodes, RegionBytes: "64MiB", Lease: "30s"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.cluster.Stop()) })
	k.c, err = client.Connect(t.Context(), client.Config{Controllers: []string{k.cluster.URL}, Timeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { k.c.Close() })
	return k
}

// space makes a space.
func (k *kit) space(name string, bytes uint64, o space.Options) *space.Space {
	s, err := space.Create(k.Context(), k.c, name, bytes, o)
	require.NoError(k, err)
	return s
}

// host is a pager: what it serves are the programs of one host.
type host struct {
	*kit
	pager  *local.Process
	socket string
}

// host starts a pager. Several of them stand for several hosts.
func (k *kit) host(args ...string) *host {
	k.Helper()
	socket := filepath.Join(k.TempDir(), "pager")
	p, err := local.Spawn(k.Context(), k.quarry, append([]string{"pager", "-C", k.cluster.URL, "--socket", socket, "--metrics-listen", "127.0.0.1:0",
		"--fault-timeout", "3m"}, args...)...)
	require.NoError(k, err)
	k.Cleanup(func() {
		if !p.Ended() {
			require.NoError(k, p.Stop(), "%s", p.Log())
		}
	})
	return &host{k, p, socket}
}

func (h *host) options() vmm.Options { return vmm.Options{Socket: h.socket, Command: []string{}} }

// metric is the sum of a metric of the pager.
func (h *host) metric(name string) (sum int) {
	res, err := http.Get(h.pager.Ready["metrics"])
	require.NoError(h, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(h, err)
	found := regexp.MustCompile(`(?m)^`+name+`(?:\{.*\})? (\S+)$`).FindAllSubmatch(b, -1)
	require.NotEmpty(h, found, "%s in %s", name, b)
	for _, m := range found {
		v, err := strconv.ParseFloat(string(m[1]), 64)
		require.NoError(h, err)
		sum += int(v)
	}
	return sum
}

// child is a running program.
type child struct {
	k    *kit
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	errs strings.Builder
}

// start starts a program on a host.
func (h *host) start(name string, s *space.Space, env []string, args ...string) *child {
	h.Helper()
	exe, err := os.Executable()
	require.NoError(h, err)
	c := &child{k: h.kit, cmd: exec.CommandContext(h.Context(), exe)}
	c.cmd.Env = append(append(os.Environ(), asProgram+"="+name, asProgram+"_ARGS="+strings.Join(append([]string{s.Name(), h.socket}, args...), " "),
		"QUARRY_CONTROLLER="+h.cluster.URL), env...)
	c.cmd.Stderr = &c.errs
	c.in, err = c.cmd.StdinPipe()
	require.NoError(h, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(h, err)
	c.out = bufio.NewReader(out)
	require.NoError(h, c.cmd.Start())
	return c
}

// hear is the next line that the program prints, say gives it one.
func (c *child) hear() string {
	c.k.Helper()
	line, err := c.out.ReadString('\n')
	require.NoError(c.k, err, "%s", &c.errs)
	return strings.TrimSpace(line)
}

func (c *child) say(line string) {
	_, err := io.WriteString(c.in, line+"\n")
	require.NoError(c.k, err)
}

// wait is the rest of what the program prints, when it has ended well.
func (c *child) wait() string {
	c.k.Helper()
	b, err := io.ReadAll(c.out)
	require.NoError(c.k, err)
	require.NoError(c.k, c.cmd.Wait(), "%s", &c.errs)
	return string(b)
}

// kill ends the program as a crash would.
func (c *child) kill() {
	require.NoError(c.k, c.cmd.Process.Kill())
	_ = c.cmd.Wait()
}

// inSync says whether so many replicas of every region are in sync, and no other is there.
func (k *kit) inSync(replicas int) bool {
	b, err := exec.CommandContext(k.Context(), k.quarry, "status", "-C", k.cluster.URL, "--json").Output()
	if err != nil {
		return false
	}
	var status struct {
		Regions []struct {
			State    string
			Replicas []struct{ State string }
		}
	}
	require.NoError(k, json.Unmarshal(b, &status))
	for _, r := range status.Regions {
		if r.State != "open" || len(r.Replicas) != replicas {
			return false
		}
		for _, p := range r.Replicas {
			if p.State != "in_sync" {
				return false
			}
		}
	}
	return len(status.Regions) > 0
}
