package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree/kv"
)

// kvOn runs a kv command on a tree of the shared cluster.
func kvOn(t *testing.T, tree, stdin string, args ...string) result {
	t.Helper()
	return quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, stdin, append([]string{"kv", args[0], "--tree", tree}, args[1:]...)...)
}

func TestKVKeys(t *testing.T) {
	const tree = "kv/keys"
	kvOn(t, tree, "", "get", "ada").fails(t, exitNotFound, tree)
	kvOn(t, tree, "", "create").ok(t)
	kvOn(t, tree, "", "create").fails(t, exitConflict, tree, "exists")
	kvOn(t, tree, "", "create", "--node-bytes", "3KiB").fails(t, exitFailed, "power of two")
	kvOn(t, tree, "", "put", "ada", "-d", "lovelace").ok(t)
	require.Equal(t, "lovelace", kvOn(t, tree, "", "get", "ada").ok(t))
	kvOn(t, tree, "from a pipe\n", "put", "piped").ok(t)
	require.Equal(t, "from a pipe\n", kvOn(t, tree, "", "get", "piped").ok(t))
	// Conditions.
	kvOn(t, tree, "", "put", "ada", "-d", "x", "--if-absent").fails(t, exitConflict, "exists", "ada")
	kvOn(t, tree, "", "put", "ada", "-d", "x", "--if-value", "byron").fails(t, exitConflict, "ada")
	kvOn(t, tree, "", "put", "ada", "-d", "byron", "--if-value", "lovelace").ok(t)
	var e kvEntry
	kvOn(t, tree, "", "get", "ada", "--json").decode(t, &e)
	require.Equal(t, "byron", *e.Value)
	kvOn(t, tree, "", "put", "ada", "-d", "x", "--if-version", fmt.Sprint(e.Version+1)).fails(t, exitConflict, "ada")
	kvOn(t, tree, "", "put", "ada", "-d", "king", "--if-version", fmt.Sprint(e.Version)).ok(t)
	kvOn(t, tree, "", "del", "ada", "--if-version", "1").fails(t, exitConflict, "ada")
	kvOn(t, tree, "", "del", "ada", "piped").ok(t)
	kvOn(t, tree, "", "del", "ada").fails(t, exitNotFound, "ada")
	kvOn(t, tree, "", "del", "--missing", "ada").ok(t)
	kvOn(t, tree, "", "get", "ada").fails(t, exitNotFound, "ada")
	// Keys and values of every kind.
	long := strings.Repeat("k", 1024)
	big := strings.Repeat("v", 3<<20)
	file := filepath.Join(t.TempDir(), "big")
	require.NoError(t, os.WriteFile(file, []byte(big), 0o600))
	kvOn(t, tree, "", "put", long, file).ok(t)
	kvOn(t, tree, "", "get", long, "-o", file+".out").ok(t)
	got, err := os.ReadFile(file + ".out")
	require.NoError(t, err)
	require.Equal(t, big, string(got))
	kvOn(t, tree, "", "put", "--hex", "00ff0a", "-d", "80").ok(t)
	require.Equal(t, "80\n", kvOn(t, tree, "", "get", "--hex", "00ff0a").ok(t))
	require.Equal(t, "\x80", kvOn(t, tree, "", "get", "--base64", base64.StdEncoding.EncodeToString([]byte{0, 0xff, 10}), "-o", file+".b").ok(t)[:0]+read(t, file+".b"))
	kvOn(t, tree, "", "put", "empty", "-d", "").ok(t)
	require.Empty(t, kvOn(t, tree, "", "get", "empty").ok(t))
	// Bad input.
	kvOn(t, tree, "", "put", "", "-d", "x").fails(t, exitUsage, "bad key")
	kvOn(t, tree, "", "put", long+"k", "-d", "x").fails(t, exitUsage, "1025 bytes", "1024")
	kvOn(t, tree, "", "get", "--hex", "xyz").fails(t, exitUsage, "xyz")
	kvOn(t, tree, strings.Repeat("x", 64<<20+1), "put", "huge").fails(t, exitNoSpace, "67108864")
	ref := alloc(t, "no tree", "--name", "kv/object")
	kvOn(t, "kv/object", "", "get", "ada").fails(t, exitUsage, "kv/object", "not a tree")
	on(t, "slab", "free", "@kv/object").ok(t)
	_ = ref
	require.Contains(t, on(t, "name", "list", "kv/").ok(t), "CREATED")
	require.Contains(t, on(t, "name", "list", "kv/", "--kind", "tree").ok(t), tree)
	kvOn(t, tree, "", "drop").ok(t)
	kvOn(t, tree, "", "drop").fails(t, exitNotFound, tree)
}

func read(t *testing.T, file string) string {
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(b)
}

func TestKVRanges(t *testing.T) {
	const tree = "kv/ranges"
	kvOn(t, tree, "", "create", "--node-bytes", "1KiB", "--replicas", "2").ok(t)
	var in strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&in, `{"key":"k%05d","value":"v%d"}`+"\n", i, i)
	}
	require.Contains(t, kvOn(t, tree, in.String(), "load").ok(t), "3000 entries")
	require.Equal(t, "3000\n", kvOn(t, tree, "", "count").ok(t))
	require.Equal(t, "100\n", kvOn(t, tree, "", "count", "--prefix", "k001").ok(t))
	require.Equal(t, "50\n", kvOn(t, tree, "", "count", "--from", "k00100", "--to", "k00150").ok(t))
	var splits []kvSplit
	require.NoError(t, json.Unmarshal([]byte(quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, "", "kv", "splits", tree, "--parts", "3", "--from", "k00100", "--json").ok(t)), &splits))
	require.Len(t, splits, 3)
	require.Equal(t, "k00100", *splits[0].From)
	require.Nil(t, splits[2].To)
	counted := 0
	for i, s := range splits {
		require.Equal(t, i, s.Index)
		require.Regexp(t, `^n\d$`, s.Node)
		args := []string{"count", "--from", *s.From}
		if s.To != nil {
			require.Equal(t, splits[i+1].From, s.To)
			args = append(args, "--to", *s.To)
		}
		n, err := strconv.Atoi(strings.TrimSpace(kvOn(t, tree, "", args...).ok(t)))
		require.NoError(t, err)
		require.InEpsilon(t, n, s.Keys, 0.5)
		counted += n
	}
	require.Equal(t, 2900, counted)
	require.Regexp(t, `(?m)^INDEX +NODE +LEAVES +KEYS +BYTES +FROM +TO\n0 +n\d +\d+ +\d+ .* - +k0`, kvOn(t, tree, "", "splits", "-n", "2").ok(t))
	kvOn(t, tree, "", "splits", "-n", "0").fails(t, exitUsage, "want 1 to 4096")
	require.Equal(t, "k02999\tv2999\nk02998\tv2998\n", kvOn(t, tree, "", "scan", "--reverse", "-n", "2").ok(t))
	require.Equal(t, "k00007\n", kvOn(t, tree, "", "scan", "--prefix", "k00007", "--keys-only").ok(t))
	require.Equal(t, "6b3030303037\t7637\n", kvOn(t, tree, "", "scan", "--prefix", "6b3030303037", "--hex").ok(t))
	lines := strings.Split(strings.TrimSpace(kvOn(t, tree, "", "scan", "--from", "k02990", "--json").ok(t)), "\n")
	require.Len(t, lines, 10)
	var e kvEntry
	require.NoError(t, json.Unmarshal([]byte(lines[3]), &e))
	require.Equal(t, "k02993", *e.Key)
	kvOn(t, tree, "", "scan", "--prefix", "k", "--from", "a").fails(t, exitUsage, "--prefix")
	kvOn(t, tree, "", "scan", "-n=-1").fails(t, exitUsage, "--limit")
	var s kvStatsView
	kvOn(t, tree, "", "stats", "--json").decode(t, &s)
	require.Equal(t, 3000, s.Survey.Keys)
	require.Equal(t, "tree", s.Kind)
	require.GreaterOrEqual(t, s.Survey.Levels, 3)
	require.Contains(t, kvOn(t, tree, "", "stats").ok(t), "3000")
	// A tree's nodes have the replicas of its root, whoever makes them.
	var f fsckView
	on(t, "fsck", "--json").decode(t, &f)
	require.Empty(t, f.Findings)
	found := false
	for _, v := range f.Trees {
		if v.Name == tree {
			found = true
			require.Equal(t, 3000, v.Keys)
		}
	}
	require.True(t, found)
	require.Contains(t, on(t, "fsck").ok(t), tree)
	kvOn(t, tree, "", "drop").ok(t)
}

func TestKVFiles(t *testing.T) {
	const tree = "kv/files"
	dir := t.TempDir()
	kvOn(t, tree, "", "create").ok(t)
	csv := filepath.Join(dir, "in.csv")
	require.NoError(t, os.WriteFile(csv, []byte("key,value\nb,2\na,\"one\nline, two\"\nc,\n"), 0o600))
	require.Contains(t, kvOn(t, tree, "", "load", csv).ok(t), "3 entries")
	require.Equal(t, "one\nline, two", kvOn(t, tree, "", "get", "a").ok(t))
	kvOn(t, tree, "", "put", "--hex", "ff00", "-d", "0d0a80").ok(t)
	// Out and in again, in every form that takes binary.
	for _, args := range [][]string{{"out.csv", "--base64"}, {"out.csv", "--hex"}, {"out.jsonl"}, {"out.jsonl", "--hex"}} {
		file := filepath.Join(dir, args[0])
		kvOn(t, tree, "", append([]string{"dump", file}, args[1:]...)...).ok(t)
		copied := tree + "/copy"
		kvOn(t, copied, "", "create").ok(t)
		require.Contains(t, kvOn(t, copied, "", "load", file, "--sorted").ok(t), "4 entries")
		require.Equal(t, kvOn(t, tree, "", "scan", "--hex").ok(t), kvOn(t, copied, "", "scan", "--hex").ok(t))
		kvOn(t, copied, "", "load", file, "--sorted").fails(t, exitConflict, "not empty")
		kvOn(t, copied, "", "load", file).ok(t)
		kvOn(t, copied, "", "drop").ok(t)
		require.NoError(t, os.Remove(file))
	}
	gone := filepath.Join(dir, "text.csv")
	kvOn(t, tree, "", "dump", gone).fails(t, exitFailed, "--base64")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1, "a dump that failed leaves no file: %v", left)
	// Truncated and malformed files: the line is named, and what has been stored.
	cut := filepath.Join(dir, "cut.jsonl")
	require.NoError(t, os.WriteFile(cut, []byte("{\"key\":\"x\",\"value\":\"1\"}\n{\"key\":\"y\",\"va"), 0o600))
	kvOn(t, tree, "", "load", cut).fails(t, exitFailed, cut, "line 2", "cut off", "nothing is stored")
	kvOn(t, tree, "", "get", "x").fails(t, exitNotFound, "x")
	kvOn(t, tree, "", "load", "--no-sort", cut).fails(t, exitFailed, cut, "line 2", "cut off", "1 entries before it")
	require.Equal(t, "1", kvOn(t, tree, "", "get", "x").ok(t))
	empty := tree + "/empty"
	kvOn(t, empty, "", "create").ok(t)
	kvOn(t, empty, "", "load", "--sorted", cut).fails(t, exitFailed, "line 2", "cut off")
	kvOn(t, empty, "key,value\nb,1\na,2\n", "load", "--sorted", "--format", "csv").fails(t, exitFailed, "line 3", "rising order", "--sorted")
	require.Equal(t, "0\n", kvOn(t, empty, "", "count").ok(t), "all or nothing")
	kvOn(t, empty, "key;value\n", "load", "--format", "csv").fails(t, exitFailed, "line 1")
	kvOn(t, empty, "key,value\n"+strings.Repeat("k", 1025)+",1\n", "load", "--format", "csv").fails(t, exitUsage, "line 2", "1025")
	kvOn(t, empty, "", "load", "--fill", "49", csv).fails(t, exitUsage, "--fill 49", "50 to 100")
	kvOn(t, empty, "", "load", "--fill", "101", csv).fails(t, exitUsage, "--fill 101", "50 to 100")
	kvOn(t, empty, "", "load", "--sort-memory", "1000", csv).fails(t, exitUsage, "--sort-memory", "1.0 MiB")
	kvOn(t, empty, "", "load", "--sorted", "--no-sort", csv).fails(t, exitUsage, "--sorted", "--no-sort")
	kvOn(t, empty, "", "load", "no-such-file").fails(t, exitUsage, "no-such-file")
	kvOn(t, empty, "", "drop").ok(t)
	kvOn(t, tree, "", "drop").ok(t)
}

// TestKVCollect: what nobody has is freed, what a tree has is not.
func TestKVCollect(t *testing.T) {
	const tree = "kv/collect"
	kvOn(t, tree, "", "create").ok(t)
	var in strings.Builder
	for i := range 500 {
		fmt.Fprintf(&in, `{"key":"k%05d","value":"%0*d"}`+"\n", i, 1+i%400, i)
	}
	kvOn(t, tree, in.String(), "load").ok(t)
	before := kvOn(t, tree, "", "scan").ok(t)
	// As a client leaves them that dies between making and linking.
	tag := fmt.Sprint(0x10003)
	a, b := alloc(t, "a node, never linked", "--tag", tag), alloc(t, "another", "--tag", tag)
	other := alloc(t, "not of a tree", "--tag", "7")
	var o kv.Collected
	on(t, "kv", "collect", "--dry-run", "--json").decode(t, &o)
	require.GreaterOrEqual(t, o.Strays, 2)
	require.Positive(t, o.Reached)
	on(t, "slab", "read", a).ok(t)
	on(t, "kv", "collect").ok(t)
	on(t, "slab", "read", a).fails(t, exitNotFound, "freed")
	on(t, "slab", "read", b).fails(t, exitNotFound, "freed")
	on(t, "slab", "free", other).ok(t)
	require.Equal(t, before, kvOn(t, tree, "", "scan").ok(t))
	on(t, "kv", "collect", "--json").decode(t, &o)
	require.Zero(t, o.Strays)
	kvOn(t, tree, "", "drop").ok(t)
}

// TestKVDamage: a name that leads to no tree any more is a finding of fsck.
func TestKVDamage(t *testing.T) {
	const tree = "kv/damaged"
	var made struct{ Root string }
	quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, "", "kv", "create", "--tree", tree, "--json").decode(t, &made)
	kvOn(t, tree, "", "put", "a", "-d", "1").ok(t)
	on(t, "fsck").ok(t)
	on(t, "slab", "free", made.Root).ok(t)
	on(t, "fsck").fails(t, exitDamaged, tree, "dropped")
	on(t, "fsck", "--bad").ok(t)
	on(t, "fsck", "--bad", "--repair").fails(t, exitUsage, "--bad")
	kvOn(t, tree, "", "get", "a").fails(t, exitNotFound, tree)
	on(t, "name", "delete", tree).ok(t)
	on(t, "fsck").ok(t)
}

// TestKVOfAnotherFormat: a root of another format is a finding too, and the trees behind it are checked.
func TestKVOfAnotherFormat(t *testing.T) {
	const old, damaged = "kv/format-a", "kv/format-b"
	var roots [2]struct{ Root string }
	for i, tree := range []string{old, damaged} {
		quarry(t, []string{"QUARRY_CONTROLLER=" + cluster(t).URL}, "", "kv", "create", "--tree", tree, "--json").decode(t, &roots[i])
	}
	on(t, "slab", "write", roots[0].Root, "-d", "\x01 of an earlier build").ok(t)
	on(t, "slab", "free", roots[1].Root).ok(t)
	on(t, "fsck").fails(t, exitDamaged, "2 findings", old, "node format 1")
	kvOn(t, old, "", "get", "a").fails(t, exitDamaged, "node format 1")
	on(t, "slab", "free", roots[0].Root).ok(t)
	for _, tree := range []string{old, damaged} {
		on(t, "name", "delete", tree).ok(t)
	}
	on(t, "fsck").ok(t)
}

func TestKVBench(t *testing.T) {
	var b struct {
		Rows []struct {
			What, Op, Note string
			Ops, Errors    int64
			Rounds         float64 `json:"rounds_per_op"`
		}
	}
	on(t, "bench", "--json", "-D", "50ms", "--objects", "2000", "-n", "2", "--ops", "kv-insert,kv-get,kv-put,kv-mix,kv-scan,kv-load", "--no-yardsticks").decode(t, &b)
	require.Len(t, b.Rows, 12)
	for _, r := range b.Rows {
		require.Positive(t, r.Ops, r)
		require.Zero(t, r.Errors, r)
		switch r.Op {
		case "kv-get":
			require.InDelta(t, 1, r.Rounds, 0.05, r)
		case "kv-put": // sharing a reservation makes it less
			require.LessOrEqual(t, r.Rounds, 2.1, r)
		case "kv-insert", "kv-load":
			require.Contains(t, r.Note, "2000 keys")
		}
	}
	on(t, "bench", "--ops", "kv-get,kv-insert", "--objects", "100", "-D", "20ms", "--no-yardsticks").fails(t, exitFailed, "first")
	on(t, "bench", "--ops", "kv-get", "--processes", "2", "--no-yardsticks").fails(t, exitFailed, "processes")
	require.Equal(t, "", on(t, "name", "list", "bench/").ok(t)[len("NAME  KIND  REF  REVISION  OWNER  CREATED\n"):], "no tree is left")
}

// TestKVFillBench: the memory a key for each order of keys, more than the keys and values themselves.
func TestKVFillBench(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for nodes to count their blocks; not with -short")
	}
	var b struct {
		Rows []struct {
			What, Op, Order string
			Keys            int
			BytesPerKey     float64 `json:"bytes_per_key"`
		}
	}
	quarry(t, nil, "", "bench", "--self", "--json", "--transport", "shm", "--objects", "20000", "--ops", "kv-fill", "--no-yardsticks").decode(t, &b)
	per := map[string]float64{}
	for _, r := range b.Rows {
		require.Equal(t, 20_000, r.Keys)
		require.Greater(t, r.BytesPerKey, 128.0, r)
		require.Less(t, r.BytesPerKey, 3000.0, r)
		per[r.Order] = r.BytesPerKey
	}
	require.Len(t, per, 5)
	t.Log(per)
}
