package deploytest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const composeFile = "docker-compose.yml"

func TestComposeIsRead(t *testing.T) {
	run(t, filepath.Join(root, "deploy", "compose"), tool(t, "docker-compose", "apt-get install docker-compose"), "-f", composeFile, "config", "-q")
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
			if strings.HasPrefix(from, ".") {
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
	require.Equal(t, map[string]int{"controller": 3, "storage": 3, "status": 1}, roles)
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
