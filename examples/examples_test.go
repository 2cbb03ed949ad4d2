package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
)

// What each example prints.
var outputs = map[string]string{
	"01-hello":        "hello\nworld\ntrue\n",
	"02-counter":      "800\n",
	"03-names":        "twice: true\nexample/settings: settings, second edition\n",
	"04-batch":        "64 objects, 566 bytes, 1 round\n",
	"05-swap":         "first: <nil>\nlate: true\n",
	"06-many-clients": "ping pong\n",
	"07-kv":           "grace hopper\nfirst: <nil> second late: true\nada king\nalan turing\n",
	"08-plugin":       "done: greeting has 5 bytes\n",
}

func TestExamples(t *testing.T) {
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, "../cmd/quarry", "./...")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	c, err := local.Start(t.Context(), local.Config{Binary: filepath.Join(bin, "quarry"), Nodes: 1, RegionBytes: "64MiB"})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Stop()) }()
	dirs, err := filepath.Glob("[0-9]*")
	require.NoError(t, err)
	require.Len(t, dirs, len(outputs))
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for _, dir := range dirs {
		t.Run(dir, func(t *testing.T) {
			require.Contains(t, string(readme), "["+dir+"]("+dir+"/main.go)")
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, dir))
			cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+c.URL)
			var errs strings.Builder
			cmd.Stderr = &errs
			out, err := cmd.Output()
			require.NoError(t, err, errs.String())
			require.Equal(t, outputs[dir], string(out))
		})
	}
}
