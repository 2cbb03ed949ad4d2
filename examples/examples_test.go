package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/testbinary"
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
	"08-plugin":       "5\n",
	"09-job":          "done: greeting has 5 bytes\n",
}

// Examples that serve until they are interrupted, and what is asked of them meanwhile.
var services = map[string]string{
	"08-plugin": `quarry kv create -t texts >&2; quarry kv put -t texts greeting -d hello
until quarry job run lengths --input tree:texts --output tree:lengths >&2; do sleep 0.1; done
quarry kv get -t lengths greeting; echo`,
}

func TestExamples(t *testing.T) {
	bin := testbinary.Build(t, "./cmd/quarry", "./examples/...")
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
			if script := services[dir]; script != "" {
				var said strings.Builder
				cmd.Stdout, cmd.Stderr = &said, &said
				require.NoError(t, cmd.Start())
				defer func() {
					require.NoError(t, cmd.Process.Signal(os.Interrupt))
					require.NoError(t, cmd.Wait(), "%s", &said)
					require.Contains(t, said.String(), "ready")
				}()
				cmd := exec.CommandContext(t.Context(), "sh", "-ec", script)
				cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+c.URL, "PATH="+bin+":"+os.Getenv("PATH"))
				cmd.Stderr = &errs
				out, err := cmd.Output()
				require.NoError(t, err, errs.String())
				require.Equal(t, outputs[dir], string(out))
				return
			}
			cmd.Stderr = &errs
			out, err := cmd.Output()
			require.NoError(t, err, errs.String())
			require.Equal(t, outputs[dir], string(out))
		})
	}
}
