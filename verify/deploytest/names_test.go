package deploytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/internal/metrics"
)

const root = "../.."

// files lists the files of the repository below some folders.
func files(t *testing.T, folders ...string) []string {
	t.Helper()
	var out []string
	for _, f := range folders {
		err := filepath.WalkDir(filepath.Join(root, f), func(path string, e os.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() {
				out = append(out, path)
			}
			return err
		})
		require.NoError(t, err)
	}
	require.NotEmpty(t, out)
	return out
}

// tool finds a program, or skips the test.
func tool(t *testing.T, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not installed (%s)", name, pkg)
	}
	return path
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

var metricName = regexp.MustCompile(`\bquarry_[a-z0-9_]+`)

// Dashboards, rules and pages name only metrics that there are.
func TestEveryMetricNamedExists(t *testing.T) {
	known := map[string]bool{}
	for _, g := range collect.Groups() {
		for _, d := range g.Defs {
			known[d.Name] = true
			if d.Kind == metrics.Histogram {
				known[d.Name+"_bucket"], known[d.Name+"_sum"], known[d.Name+"_count"] = true, true, true
			}
		}
	}
	named := 0
	for _, file := range files(t, "deploy", "docs") {
		if filepath.Base(file) == "C.md" { // functions of libquarry begin with quarry_, too
			continue
		}
		if !slices.Contains([]string{".json", ".yml", ".yaml", ".md", ".tpl"}, filepath.Ext(file)) {
			continue
		}
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range metricName.FindAllString(string(b), -1) {
			named++
			if !known[m] {
				t.Errorf("%s names %s, which no process serves", file, m)
			}
		}
	}
	require.Greater(t, named, 100)
}
