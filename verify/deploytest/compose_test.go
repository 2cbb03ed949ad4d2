package deploytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const composeFile = "docker-compose.yml"

func TestComposeIsRead(t *testing.T) {
	compose := tool(t, "docker-compose", "apt-get install docker-compose")
	config := func(token, password string) ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), compose, "-f", composeFile, "config", "-q")
		cmd.Dir = filepath.Join(root, "deploy", "compose")
		cmd.Env = append(os.Environ(), "QUARRY_TOKEN="+token, "QUARRY_REDIS_PASSWORD_FILE="+password)
		return cmd.CombinedOutput()
	}
	out, err := config("secret", "/redis-password")
	require.NoError(t, err, "%s", out)
	out, err = config("secret", "")
	require.Error(t, err, "any client of this host would be served")
	require.Contains(t, string(out), "QUARRY_REDIS_PASSWORD_FILE")
	out, err = config("", "/redis-password")
	require.Error(t, err, "the services listen on all addresses")
	require.Contains(t, string(out), "QUARRY_TOKEN")
}

// Whatever a container of ours is led to do, it has no right that it does not need, and no port of
// it is open beyond this host.
func TestComposeIsConfined(t *testing.T) {
	var f struct {
		Services map[string]struct {
			Image       string
			CapDrop     []string `yaml:"cap_drop"`
			SecurityOpt []string `yaml:"security_opt"`
			ReadOnly    bool     `yaml:"read_only"`
			Privileged  bool
			Ports       []string
			Environment map[string]string
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "deploy", "compose", composeFile)), &f))
	for name, s := range f.Services {
		for _, p := range s.Ports {
			require.True(t, strings.HasPrefix(p, "127.0.0.1:"), "%s: %s", name, p)
		}
		if s.Image != "quarry:latest" {
			continue
		}
		require.Equal(t, []string{"ALL"}, s.CapDrop, name)
		require.Contains(t, s.SecurityOpt, "no-new-privileges:true", name)
		require.True(t, s.ReadOnly, name)
		require.False(t, s.Privileged, name)
		require.Contains(t, s.Environment["QUARRY_TOKEN"], "${QUARRY_TOKEN:?", name)
	}
}

// Every service of ours is a command line that the command takes, what it mounts is
// there, and Prometheus scrapes all of them.
func TestComposeServices(t *testing.T) {
	dir := filepath.Join(root, "deploy", "compose")
	var f struct {
		Services map[string]struct {
			Image     string
			Command   []string
			Volumes   []string
			DependsOn []string `yaml:"depends_on"`
		}
		Volumes map[string]any
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "deploy", "compose", composeFile)), &f))
	scraped := read(t, "deploy", "prometheus", "prometheus.yml")
	roles := map[string]int{}
	for name, s := range f.Services {
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if strings.HasPrefix(v, "${") { // a file of the operator's
				require.True(t, strings.HasSuffix(v, ":ro") && strings.Contains(v, ":?"), "%s: %s", name, v)
			} else if strings.HasPrefix(from, ".") {
				_, err := os.Stat(filepath.Join(dir, from))
				require.NoError(t, err, name)
			} else {
				require.Contains(t, f.Volumes, from, name)
			}
		}
		if s.Image != "quarry:latest" {
			continue
		}
		understood(t, name, s.Command...)
		roles[s.Command[0]]++
		for i, a := range s.Command {
			if a == "--metrics-listen" || a == "--worker-metrics-listen" {
				_, port, _ := strings.Cut(s.Command[i+1], ":")
				require.Contains(t, scraped, `"`+name+":"+port+`"`, "prometheus.yml")
			}
		}
	}
	require.Equal(t, map[string]int{"controller": 3, "storage": 3, "gateway": 2, "status": 1}, roles)
}

// A container of a storage node has the memory that the chart gives such a pod, and the time that a node may take to end: Docker kills a
// container after 10 s. Memory of gateways is bounded as the chart bounds it.
func TestComposeDerivesMemory(t *testing.T) {
	var f struct {
		Services map[string]struct {
			Command     []string
			Environment map[string]string
			Grace       string `yaml:"stop_grace_period"`
			Deploy      struct {
				Resources struct{ Limits, Reservations struct{ Memory string } }
			}
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "deploy", "compose", composeFile)), &f))
	m := regexp.MustCompile(`--stop-timeout=(\w+)`).FindStringSubmatch(run(t, ".", binary(t), "storage", "--help"))
	require.NotNil(t, m)
	waits, err := time.ParseDuration(m[1])
	require.NoError(t, err)
	nodes, gateways := 0, 0
	for name, s := range f.Services {
		memory := s.Deploy.Resources
		switch {
		case len(s.Command) > 0 && s.Command[0] == "storage":
			nodes++
			of := func(flag string) string { return s.Command[slices.Index(s.Command, flag)+1] }
			require.NotContains(t, s.Command, "--stop-timeout")
			grace, err := time.ParseDuration(s.Grace)
			require.NoError(t, err, name)
			require.Greater(t, grace, waits, name)
			require.NotEmpty(t, s.Environment["QUARRY_TOKEN"], name)
			request, limit := storageMemory(t, fmt.Sprintf("storage.medium=pvc,storage.persistence.size=8Gi,storage.capacity=%s,storage.workers=%s,storage.workerMemory=%s",
				of("--capacity"), of("--workers"), s.Environment["QUARRY_WORKER_MEMORY"]))
			require.Equal(t, [2]any{request, limit}, [2]any{memory.Reservations.Memory + "i", memory.Limits.Memory + "i"}, name)
		case len(s.Command) > 0 && s.Command[0] == "gateway":
			gateways++
			require.Equal(t, "1024M", memory.Limits.Memory, name)
		}
	}
	require.Equal(t, [2]int{3, 2}, [2]int{nodes, gateways})
}

var (
	from   = regexp.MustCompile(`(?m)^FROM (\S+)(?: AS (\S+))?$`)
	copies = regexp.MustCompile(`(?m)^COPY (?:--from=(\S+) )?(?:--chown=\S+ )?(.+) \S+$`)
)

// Stages exist before they are used, and what is copied from the repository is there.
func TestDockerfile(t *testing.T) {
	text := read(t, "deploy", "docker", "Dockerfile")
	stages := map[string]bool{}
	for _, m := range from.FindAllStringSubmatch(text, -1) {
		if base := m[1]; !strings.ContainsAny(base, ":$") && base != "scratch" {
			require.True(t, stages[base], "FROM %s: no such stage before", base)
		}
		stages[m[2]] = true
	}
	for _, want := range []string{"source", "build", "verbs", "static"} {
		require.True(t, stages[want], want)
	}
	for _, m := range copies.FindAllStringSubmatch(text, -1) {
		if m[1] != "" {
			require.True(t, stages[m[1]], "COPY --from=%s", m[1])
			continue
		}
		for _, file := range strings.Fields(m[2]) {
			_, err := os.Stat(filepath.Join(root, file))
			require.NoError(t, err)
		}
	}
	last := from.FindAllStringSubmatch(text, -1)
	require.Equal(t, []string{"scratch", "static"}, last[len(last)-1][1:], "the default target, which is the last, is the static one")
	for _, stage := range regexp.MustCompile(`(?m)^FROM `).Split(text, -1) {
		if strings.Contains(stage, "${VERSION}") {
			require.Contains(t, stage, "\nARG VERSION=", "not every builder lets a stage inherit it")
		}
	}
	goMod := read(t, "go.mod")
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(goMod)[1]
	require.Contains(t, text, "ARG GO_VERSION="+version, "the Go of go.mod")
	require.Contains(t, text, "-tags verbs")
}
