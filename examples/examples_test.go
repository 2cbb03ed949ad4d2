package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/uffd"
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
	"11-space":        "one address space, 3 times\n",
	"10-splits":       "4 parts, 6000 words\npart 0 of 4 on n1 again\nthe same\n",
	"14-call":         "1 lines\n2 lines\n3 lines\nrefused: true\ngranite\nstone\nwater\n",
	"15-memory":       "0x100000000000 is 0x100000000000\na page, a new page\n",
	"12-watch":        "closed\nopen\nfreed: true\n",
	"13-kv-watch":     "lamp is off\nwatching\nlamp is on\nlamp is gone\n",
	"17-pool":         "0: opened\n1: deposit 20\n2: withdraw 5\n",
	"18-pool-set":     "0: opened\n1: deposit 20\n2: withdraw 5\nthe pool has all of it: true\n",
	"19-index":        "800 of 800, the index is the table\n",
	"16-flight":       "{\"batch\":1,\"puts\":2000,\"total\":2000}\n2000 rows, 20000 bytes of values\n",
}

// Examples that are started as many processes, or beside others, and what is seen of them: as Kubernetes starts the pods of a Job with indexes, and one of them
// again. A pod may come before another one has cut the tree.
var processes = map[string]string{
	"14-call": `14-call worker --node n1 >&2 & trap "kill -INT $!; wait" EXIT
14-call`,
	"10-splits": `export PARTS=4 INPUT=lines RUN=runs/count-words
quarry kv create -t lines --node-bytes 1KiB >&2
seq 2000 | awk '{printf "{\"key\":\"line %05d\",\"value\":\"one line %d\"}\n", $1, $1}' | quarry kv load -t lines >&2
pids=
for i in 3 1 2 0; do JOB_COMPLETION_INDEX=$i 10-splits >&2 & pids="$pids $!"; done
for pid in $pids; do wait $pid; done
quarry kv scan -t $RUN --prefix part/ | awk '{n++; sum += $2} END {print n " parts, " sum " words"}'
before=$(quarry kv scan -t $RUN)
quarry kv put -t lines 'line 00001 and more' -d 'a word' >&2
quarry kv del -t lines 'line 00001 and more' >&2
JOB_COMPLETION_INDEX=0 10-splits | sed 's/, on \(.*\):.*/ on \1 again/'
JOB_COMPLETION_INDEX=9 10-splits | grep -q 'nothing to do'
test "$before" = "$(quarry kv scan -t $RUN)" && echo the same`,
	"15-memory": `dir=$(mktemp -d); export QUARRY_PAGER_SOCKET=$dir/pager
quarry pager --memory 2MiB >&2 & pid=$!
until test -S $QUARRY_PAGER_SOCKET; do sleep 0.1; done
15-memory
kill $pid; wait $pid || test $? = 130; rm -r $dir`,
	"17-pool": `cd $(mktemp -d); 17-pool; rm -r "$PWD"`,
	"18-pool-set": `cd $(mktemp -d); printf 'PMEMPOOLSET\n1MiB %s/log\nREPLICA quarry: example-set\n' "$PWD" > log.set
18-pool-set log.set; rm -r "$PWD"`,
	"19-index": `dir=$(mktemp -d); quarry kv create -t people >&2
people() { awk -v moved=$1 '{printf "{\"key\":\"p%04d\",\"value\":\"{\\\"City\\\":\\\"c%d\\\"}\"}\n", $1, ($1+moved)%7}' | quarry kv load -t people >&2; }
killed() {
kill -9 $pid; ! wait $pid
for s in $(quarry session list | awk '$2 == "19-index" {print $1}'); do quarry session revoke $s >&2; done; }
seq 1000 | people 0
19-index >&2 & pid=$!
until quarry kv count -t people/by-city 2>/dev/null | grep -q '[1-9]'; do kill -0 $pid; done
killed # in the first scan
19-index >&2 & pid=$!
seq 1000 | people 1
killed # under changes
quarry kv del -t people $(seq 1 5 1000 | awk '{printf "p%04d ", $1}') >&2
19-index >&2 & pid=$!
writers= # several at the same keys, one of which removes them
for moved in 2 3 4; do { seq 2 5 1000; seq 3 5 1000; } | people $moved & writers="$writers $!"; done
quarry kv del -t people $(seq 3 5 1000 | awk '{printf "p%04d ", $1}') >&2 & writers="$writers $!"
wait $writers
seq 3 10 1000 | people 5
killed
seq 8 10 1000 | people 6
19-index synced
quarry kv scan -t people | awk -F '[\t"]' '{print "city/" $5 "/" $1}' | sort > $dir/people
quarry kv scan -t people/by-city --prefix city/ --keys-only | sort > $dir/index
echo "$(wc -l < $dir/people) of $(wc -l < $dir/index), the index is$(cmp -s $dir/people $dir/index || echo ' not') the table"
rm -r $dir`,
	"16-flight": `quarry kv create -t prices >&2
ready=$(mktemp)
quarry gateway flight --spread --listen 127.0.0.1:0 --json > $ready & pid=$!
trap 'kill $pid; wait $pid; rm $ready' EXIT
until grep -q address $ready; do kill -0 $pid; sleep 0.1; done
16-flight $(sed 's/.*"address":"\([^"]*\)".*/\1/' $ready) prices`,
}

// Examples that serve until they are interrupted, and what is asked of them meanwhile.
var services = map[string]string{
	"08-plugin": `quarry kv create -t texts >&2; quarry kv put -t texts greeting -d hello
until quarry job run lengths --input tree:texts --output tree:lengths >&2; do sleep 0.1; done
quarry kv get -t lengths greeting; echo`,
}

// The module of Beam's pipelines is not part of this one, because of its dependencies; its tests need a cluster.
func TestBeam(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it runs processes of Beam, and no goroutines of this module")
	}
	bin := testbinary.Build(t, "./cmd/quarry")
	c, err := local.Start(t.Context(), local.Config{Binary: filepath.Join(bin, "quarry"), Nodes: 1, RegionBytes: "64MiB", Lease: "30s"})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Stop()) }()
	files, err := filepath.Glob("../btree/kv/beamio/*")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files { // so that go test runs this package again when one has changed
		_, err := os.ReadFile(name)
		require.NoError(t, err)
	}
	tests := filepath.Join(t.TempDir(), "beamio.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-C", "../btree/kv/beamio", "-c", "-vet=off", "-ldflags=-s -w", "-o", tests, ".")
	build.Env = append(testbinary.ToolEnv(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	if err != nil && os.Getenv("QUARRY_NO_INSTALL") != "" {
		if said, err := exec.CommandContext(t.Context(), "go", "list", "-C", "../btree/kv/beamio", "-deps", "-test", ".").CombinedOutput(); err != nil {
			t.Skipf("modules of Beam are not here: make tools downloads them: %.500s", said)
		}
	}
	require.NoError(t, err, string(out))
	cmd := exec.CommandContext(t.Context(), tests, "-test.timeout=10m")
	cmd.Dir = "../btree/kv/beamio"
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+strings.Join([]string{c.URL, "http://127.0.0.1:1"}, ","))
	out, err = cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestExamples(t *testing.T) {
	bin := testbinary.Build(t, "./cmd/quarry", "./examples/...")
	c, err := local.Start(t.Context(), local.Config{Binary: filepath.Join(bin, "quarry"), Nodes: 1, RegionBytes: "64MiB", Lease: "30s"})
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
			if dir == "15-memory" {
				fd, _, err := uffd.Open()
				if err != nil {
					t.Skip("page faults cannot be served here: ", err)
				}
				unix.Close(fd)
			}
			env := append(os.Environ(), "QUARRY_CONTROLLER="+c.URL, "PATH="+bin+":"+os.Getenv("PATH"))
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, dir))
			if script := processes[dir]; script != "" {
				cmd = exec.CommandContext(t.Context(), "sh", "-ec", script)
			}
			cmd.Env = env
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
				cmd.Env = env
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
