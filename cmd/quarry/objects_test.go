package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/bench"
)

func alloc(t *testing.T, data string, more ...string) string {
	t.Helper()
	return strings.TrimSpace(on(t, append([]string{"slab", "alloc", "--data", data}, more...)...).ok(t))
}

func TestObjects(t *testing.T) {
	ref := alloc(t, "hello")
	require.Equal(t, "hello", on(t, "slab", "read", ref).ok(t))
	on(t, "slab", "write", ref, "--data", "world").ok(t)
	require.Equal(t, "world", on(t, "slab", "read", ref, "--transport", "tcp").ok(t))
	var o objectView
	on(t, "slab", "stat", ref, "--json").decode(t, &o)
	require.EqualValues(t, 5, o.Info.Bytes)
	on(t, "slab", "write", ref, "--data", "x", "--if-version", "99").fails(t, exitConflict, "another version")
	on(t, "slab", "free", ref).ok(t)
	on(t, "slab", "free", ref).fails(t, exitNotFound, "freed", ref)
	on(t, "slab", "read", ref).fails(t, exitNotFound, "freed")
	on(t, "slab", "write", ref, "--data", "x").fails(t, exitNotFound, "freed")
}

func TestPayloadsFromFilesAndStandardInput(t *testing.T) {
	env := []string{"QUARRY_CONTROLLER=" + cluster(t).URL}
	big := strings.Repeat("0123456789abcdef", 3<<20/16) // larger than a slab
	file := filepath.Join(t.TempDir(), "in")
	require.NoError(t, os.WriteFile(file, []byte(big), 0o600))
	ref := strings.TrimSpace(on(t, "slab", "alloc", file, "--replicas", "2", "--write-once").ok(t))
	require.Equal(t, big, on(t, "slab", "read", ref).ok(t))
	back := filepath.Join(t.TempDir(), "out")
	on(t, "slab", "read", ref, "-o", back).ok(t)
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, big, string(got))
	on(t, "slab", "write", ref, "--data", "x").fails(t, exitConflict, "write-once")
	on(t, "slab", "free", ref).ok(t)

	ref = strings.TrimSpace(quarry(t, env, "from a pipe", "slab", "alloc", "-").ok(t))
	require.Equal(t, "from a pipe", on(t, "slab", "read", ref).ok(t))
	quarry(t, env, "again", "slab", "write", ref).ok(t)
	require.Equal(t, "again", on(t, "slab", "read", ref).ok(t))
	on(t, "slab", "free", ref).ok(t)
	on(t, "fsck").ok(t)
}

func TestNames(t *testing.T) {
	a, b := alloc(t, "a", "--name", "names/x"), alloc(t, "b")
	require.Equal(t, "a", on(t, "slab", "read", "@names/x").ok(t))
	on(t, "slab", "alloc", "--data", "c", "--name", "names/x").fails(t, exitConflict, "names/x", "exists")
	on(t, "name", "set", "--new", "names/x", b).fails(t, exitConflict, "exists")
	var n struct {
		Revision uint64
		Ref      string
	}
	on(t, "name", "set", "names/x", b, "--json").decode(t, &n)
	require.Equal(t, b, n.Ref)
	on(t, "name", "set", "names/x", a, "--if-revision", "1").fails(t, exitConflict, "names/x")
	require.Contains(t, on(t, "name", "get", "names/x").ok(t), b)
	require.Contains(t, on(t, "name", "list", "names/").ok(t), "names/x")
	require.NotContains(t, on(t, "name", "list", "other/").ok(t), "names/x")
	on(t, "slab", "free", "@names/x").ok(t)
	on(t, "name", "get", "names/x").fails(t, exitNotFound, "names/x")
	on(t, "name", "delete", "names/x").fails(t, exitNotFound, "names/x")
	on(t, "slab", "free", a).ok(t)
}

func TestForgedReferences(t *testing.T) {
	ref := alloc(t, "mine")
	addr, incarnation, _ := strings.Cut(ref, "/")
	region, off, _ := strings.Cut(addr, ":")
	for _, c := range []struct {
		ref  string
		code int
		what string
	}{
		{"nonsense", exitUsage, "want REGION:0xOFFSET"},
		{"@", exitUsage, "empty"},
		{addr + "/0.99999999999999", exitUsage, "ref"},
		{region + ":0x00000000/" + incarnation, exitUsage, "ref"},
		{addr + "/0.77", exitNotFound, "freed"},          // never born here
		{addr + "/5.1", exitNotFound, "not a reference"}, // a generation to come
		{"9999:" + off + "/" + incarnation, exitNotFound, "9999"},
		{region + ":0xfffffff8/" + incarnation, exitUsage, "ref"},
		{region + ":0xffffffc0/" + incarnation, exitNotFound, "not a reference"},
	} {
		for _, verb := range [][]string{{"read", c.ref}, {"stat", c.ref}, {"free", c.ref}, {"write", c.ref, "--data", "x"}} {
			r := on(t, append([]string{"slab"}, verb...)...)
			r.fails(t, c.code, c.what)
		}
	}
	require.Equal(t, "mine", on(t, "slab", "read", ref).ok(t), "nothing has changed")
	on(t, "slab", "free", ref).ok(t)
}

func TestSizesOutOfRange(t *testing.T) {
	ref := alloc(t, "small")
	env := []string{"QUARRY_CONTROLLER=" + cluster(t).URL}
	quarry(t, env, strings.Repeat("x", 100_000), "slab", "write", ref).fails(t, exitNoSpace, "too large", "100000")
	quarry(t, env, strings.Repeat("x", 64<<20+1), "slab", "alloc").fails(t, exitNoSpace, "67108864")
	on(t, "slab", "alloc", "--data", "x", "--capacity", "65MiB").fails(t, exitNoSpace, "too large")
	on(t, "slab", "alloc", "--data", "x", "--tag", "99999999").fails(t, exitUsage, "tag 99999999: want at most 262143")
	on(t, "slab", "alloc", "--data", "x", "--replicas", "9").fails(t, exitUsage, "9 replicas: want 1 to 3")
	require.Equal(t, "small", on(t, "slab", "read", ref).ok(t))
	on(t, "slab", "free", ref).ok(t)
}

func TestRegionsAndStatus(t *testing.T) {
	var made []regionView
	on(t, "region", "create", "--replicas", "2", "--size", "16MiB", "--json").decode(t, &made)
	require.Len(t, made, 1)
	require.Len(t, made[0].Replicas, 2)
	require.NotEqual(t, made[0].Replicas[0].Name, made[0].Replicas[1].Name)
	var s statusView
	on(t, "status", "--json").decode(t, &s)
	require.Len(t, s.Nodes, 2)
	require.NotEmpty(t, s.Controllers)
	require.Contains(t, on(t, "region", "list").ok(t), "n1")
	require.Contains(t, on(t, "status").ok(t), "leader")
	on(t, "region", "create", "--size", "17KiB").fails(t, exitUsage, "multiple of 1 MiB")
	on(t, "region", "create", "--replicas", "3").fails(t, on(t, "region", "create", "--replicas", "3").code, "3")
	on(t, "region", "create", "--open-words", "--size", "17KiB").fails(t, exitUsage, "multiple of 1 MiB")
	require.False(t, made[0].Open)
	on(t, "region", "create", "--open-words", "--replicas", "2", "--size", "16MiB", "--json").decode(t, &made)
	require.Len(t, made, 1)
	require.True(t, made[0].Open)
	on(t, "status", "--json").decode(t, &s)
	require.True(t, slices.ContainsFunc(s.Regions, func(r regionView) bool { return r.ID == made[0].ID && r.Open }))
	var list []sessionView
	on(t, "session", "list", "--json").decode(t, &list)
	on(t, "session", "revoke", "200000").fails(t, exitNotFound, "200000")
}

func TestFsckReportsJSON(t *testing.T) {
	ref := alloc(t, "checked", "--replicas", "2")
	var rep struct {
		Regions  []map[string]any
		Findings []any
	}
	on(t, "fsck", "--json").decode(t, &rep)
	require.NotEmpty(t, rep.Regions)
	require.Empty(t, rep.Findings)
	require.Contains(t, on(t, "fsck", "--transport", "tcp").ok(t), "no findings")
	on(t, "fsck", "--region", "4000").fails(t, exitNotFound, "4000")
	on(t, "slab", "free", ref).ok(t)
}

func TestErrorsInJSON(t *testing.T) {
	r := on(t, "name", "get", "nobody", "--json")
	var e struct {
		Error string
		Exit  int
	}
	require.NoError(t, json.Unmarshal([]byte(r.err), &e), r.err)
	require.Equal(t, exitNotFound, r.code)
	require.Equal(t, r.code, e.Exit)
	require.Contains(t, e.Error, "nobody")
}

func TestBench(t *testing.T) {
	for _, args := range [][]string{{"--clients", "2"}, {"--processes", "2"}} {
		var b struct {
			Machine string
			Rows    []struct {
				What, Op  string
				Ops       int64
				Errors    int64
				TypicalNS int64   `json:"typical_ns"`
				Rounds    float64 `json:"rounds_per_op"`
			}
		}
		found := map[string]float64{}
		// The table of the design, with one replica. A lane that a busy machine held up for too long is opened anew, which costs
		// rounds: then the run is made again.
		want := map[string]float64{"shm read": 1, "tcp read": 1, "shm update": 2, "tcp update": 2, "shm readmany": 1, "tcp readmany": 1}
		for again := 4; ; again-- {
			on(t, append([]string{"bench", "--json", "-D", "50ms", "--objects", "200", "--ops", "read,update,alloc,free,readmany,writemany,mix", "--yardsticks"}, args...)...).decode(t, &b)
			require.NotEmpty(t, b.Machine)
			more := false
			for _, r := range b.Rows {
				require.Positive(t, r.Ops, r)
				require.Zero(t, r.Errors, r)
				require.Positive(t, r.TypicalNS, r)
				found[r.What+" "+r.Op] = r.Rounds
				more = more || r.Rounds > want[r.What+" "+r.Op]+0.05 && want[r.What+" "+r.Op] > 0
			}
			if !more || again == 0 {
				break
			}
		}
		for op, rounds := range want {
			require.InDelta(t, rounds, found[op], 0.05, op)
		}
		for _, y := range []string{"memory copy+checksum", "tcp socket ping-pong"} {
			require.Contains(t, found, y)
		}
	}
	// Objects too large for a mutable slab are read as write-once ones.
	out := on(t, "bench", "-D", "20ms", "-s", "1MiB", "--objects", "4", "--ops", "read,readmany,update", "--no-yardsticks", "--transport", "shm").ok(t)
	require.Equal(t, 3, strings.Count(out, " 1048576 "), out)
	on(t, "bench", "--ops", "fly", "--no-yardsticks").fails(t, exitUsage, "fly")
	on(t, "fsck").ok(t)
}

// TestObjectsThatWereLeft: what a program that was killed has left is found by its tag or
// its session, and freed; what has a name stays.
func TestObjectsThatWereLeft(t *testing.T) {
	a, b := alloc(t, "a", "--tag", "4711"), alloc(t, "b", "--tag", "4711", "--name", "left/b")
	other := alloc(t, "c", "--tag", "4712")
	var list []slabLine
	on(t, "slab", "list", "--tag", "4711", "--json").decode(t, &list)
	require.Len(t, list, 2)
	on(t, "slab", "list", "--owner", strconv.Itoa(int(list[0].Owner)), "--json").decode(t, &list)
	var left []slabLine
	on(t, "slab", "list", "--tag", "4711", "--not-encrypted", "--json").decode(t, &left)
	require.NotEmpty(t, left)
	on(t, "slab", "list", "--tag", "4711", "--payload-key", "0123456789ab", "--json").decode(t, &left)
	require.Empty(t, left)
	require.NotEmpty(t, list)
	on(t, "slab", "list", "--free").fails(t, exitUsage, "--owner or --tag")
	on(t, "slab", "list", "--tag", "4711", "--free", "--json").decode(t, &list)
	require.Len(t, list, 2)
	for _, o := range list {
		require.Equal(t, o.Name == "", o.Freed, "%+v", o)
	}
	on(t, "slab", "read", a).fails(t, exitNotFound, "freed")
	on(t, "slab", "read", b).ok(t)
	on(t, "slab", "read", other).ok(t)
	on(t, "slab", "free", "@left/b").ok(t)
	on(t, "slab", "free", other).ok(t)

	// A benchmark that is killed leaves its objects.
	tag := strconv.Itoa(bench.Tag)
	cmd := exec.Command(executable(t), "bench", "--ops", "read", "--objects", "300", "--duration", "5m", "--no-yardsticks", "--fabric", "tcp")
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+cluster(t).URL)
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool {
		on(t, "slab", "list", "--tag", tag, "--json").decode(t, &list)
		return len(list) >= 300
	}, patience, 100*time.Millisecond)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	on(t, "slab", "list", "--tag", tag, "--free").ok(t)
	on(t, "slab", "list", "--tag", tag, "--json").decode(t, &list)
	require.Empty(t, list)
}
