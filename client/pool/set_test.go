package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

// TestParseSet: what the syntax of poolset(5) means here.
func TestParseSet(t *testing.T) {
	s, err := pool.ParseSet("a.set", strings.NewReader("# of a ledger\r\nPMEMPOOLSET\nOPTION SINGLEHDR\n\n\t 100G /mnt/0/x/../my file\nREPLICA\n# the mirror\n102400MiB\t/mnt/1/part\n"+
		"REPLICA 104857600K /mnt/2/part\nREPLICA quarry: ledger/a\nREPLICA\tquarry:  ledger/b\nREPLICA ops@[fe80::1%eth0]  far/ledger"))
	require.NoError(t, err)
	const size = 100 << 30
	require.Equal(t, &pool.Set{Path: "a.set", Part: pool.Part{Path: "/mnt/0/my file", Bytes: size},
		Mirrors: []pool.Part{{Path: "/mnt/1/part", Bytes: size}, {Path: "/mnt/2/part", Bytes: size}}, Pools: []string{"ledger/a", "ledger/b"}, Remotes: []pool.RemotePool{{Host: "ops@[fe80::1%eth0]", Name: "far/ledger"}}}, s)
}

// TestRefusedSets: errors name the line, and a remedy.
func TestRefusedSets(t *testing.T) {
	const head = "PMEMPOOLSET\n1MiB /a\n"
	for text, want := range map[string]string{
		"":                                     "a.set: it is empty: write a line PMEMPOOLSET",
		"\n# only this\n":                      "a.set: it is empty",
		"PMEMBLK\n":                            `a.set:1: the first line is "PMEMBLK", not PMEMPOOLSET`,
		"PMEMPOOLSET":                          "it ends before the line SIZE PATH of the program's memory",
		head:                                   "it names no pool: add a line REPLICA quarry: POOL",
		head + "REPLICA":                       "it ends before the line SIZE PATH of a mirror",
		head + "2MiB /b":                       "a.set:3: a second part",
		"PMEMPOOLSET\nREPLICA":                 "a.set:2: REPLICA where a line SIZE PATH of the program's memory",
		"PMEMPOOLSET\nAUTO /d":                 "a.set:2: size AUTO is for device DAX",
		"PMEMPOOLSET\n1MiB d":                  "want the path of a file, which begins with /",
		"PMEMPOOLSET\n1MiB":                    "want the path of a file, which begins with /",
		"PMEMPOOLSET\n1MiB /d /x/..":           "want the path of a file",
		"PMEMPOOLSET\n1MiB /d/..":              "want the path of a file",
		"PMEMPOOLSET\n1MiB /d/":                "want the path of a file",
		"PMEMPOOLSET\n1XB /d":                  `size "1XB"`,
		"PMEMPOOLSET\n-1 /d":                   `size "-1"`,
		"PMEMPOOLSET\nMiB /d":                  `size "MiB"`,
		"PMEMPOOLSET\n4KiB /d":                 "want 8192 to",
		"PMEMPOOLSET\n2TiB /d":                 `size "2TiB"`,
		"PMEMPOOLSET\n1MB /d":                  "want a multiple of 4096: write the size in KiB or MiB",
		"PMEMPOOLSET\n1MiB /\x01":              "is not text",
		"PMEMPOOLSET\n18446744073709551616 /d": "size",
		"PMEMPOOLSET\n18014398509481985KiB /d": "size", // 1 KiB, if it were taken modulo 2^64
		"PMEMPOOLSET\nOPTION NOHDRS":           "a.set:2: OPTION NOHDRS: each local part has a header",
		"PMEMPOOLSET\nOPTION ELSE":             `option "ELSE": want SINGLEHDR`,
		"PMEMPOOLSET\nOPTION SINGLEHDR\nOPTION SINGLEHDR":                    "a.set:3: a second OPTION SINGLEHDR",
		head + "REPLICA\n2MiB /b":                                            "part of 2097152 bytes, the first one has 1048576",
		head + "REPLICA\n1MiB /c/../a":                                       "a.set:4: file /a is in line 2 already",
		head + "REPLICA quarry: p\nREPLICA quarry: p":                        "a.set:4: pool p is in line 3 already",
		head + "REPLICA\n1MiB /a.restoring":                                  "mirror /a.restoring: restore makes the local part under that path",
		head + "REPLICA quarry:":                                             "wants the name of a pool",
		head + "REPLICA quarry: a b":                                         "wants the name of a pool",
		head + "REPLICA quarry: " + strings.Repeat("n", pool.MaxNameBytes+1): "wants the name of a pool",
		head + "REPLICA example.com p":                                       "a.set:3: REPLICA example.com p: write REPLICA quarry: POOL, REPLICA USER@HOST POOL",
		head + "REPLICA user@example.com":                                    "wants the name of a pool",
		head + "REPLICA -oProxyCommand=x@h p":                                `host "-oProxyCommand=x@h"`,
		head + "REPLICA u@h;reboot p":                                        `host "u@h;reboot"`,
		head + "REPLICA u@ p":                                                `host "u@"`,
		head + "REPLICA u@h p\nREPLICA u@h  p":                               "a.set:4: pool u@h p is in line 3 already",
		head + "REPLICA quarry: p" + replicas(pool.MaxSetReplicas):           "a.set:11: a REPLICA more than 8",
		head + strings.Repeat("#", pool.MaxSetBytes):                         "longer than 65536 bytes",
	} {
		_, err := pool.ParseSet("a.set", strings.NewReader(text))
		require.ErrorContains(t, err, want, "%.100q", text)
		require.ErrorIs(t, err, client.ErrArgument)
	}
}

// replicas are n lines of pools.
func replicas(n int) (s string) {
	for i := range n {
		s += fmt.Sprintf("\nREPLICA quarry: p%d", i)
	}
	return s
}

// TestSetThatContainsItself: a part that is the poolset file, by whatever path.
func TestSetThatContainsItself(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "a.set"), filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(path, other))
	for _, part := range []string{path, other} {
		require.NoError(t, os.WriteFile(path, []byte("PMEMPOOLSET\n1MiB "+part+"\nREPLICA quarry: p\n"), 0o600))
		_, err := pool.ReadSet(path)
		require.ErrorContains(t, err, "is this file itself")
	}
	_, err := pool.ReadSet(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// FuzzParseSet: a text is refused, or it is a set within the limits that its own text gives again.
func FuzzParseSet(f *testing.F) {
	f.Add("PMEMPOOLSET\nOPTION SINGLEHDR\n100G /a\nREPLICA\n100G /b\nREPLICA quarry: p\n")
	f.Add("PMEMPOOLSET\n8KiB /a b\nREPLICA 8192 /b\nREPLICA quarry: p/q")
	f.Add("PMEMPOOLSET\n100G /mountpoint0/myfile.part0\nREPLICA user@example.com remote-objpool.set\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := pool.ParseSet("x", strings.NewReader(text))
		if err != nil {
			require.ErrorIs(t, err, client.ErrArgument)
			return
		}
		again := fmt.Sprintf("PMEMPOOLSET\n%d %s\n", s.Part.Bytes, s.Part.Path)
		seen := map[string]bool{s.Part.Path: true}
		for _, m := range s.Mirrors {
			require.Equal(t, s.Part.Bytes, m.Bytes)
			require.False(t, seen[m.Path])
			seen[m.Path] = true
			again += fmt.Sprintf("REPLICA\n%d %s\n", m.Bytes, m.Path)
		}
		for _, p := range s.Pools {
			again += "REPLICA quarry: " + p + "\n"
		}
		for _, r := range s.Remotes {
			again += "REPLICA " + r.String() + "\n"
		}
		require.True(t, s.Part.Bytes >= pool.MinPartBytes && s.Part.Bytes <= pool.MaxPartBytes && s.Part.Bytes%pool.HeaderBytes == 0)
		require.NotZero(t, len(s.Pools)+len(s.Remotes))
		require.LessOrEqual(t, len(s.Remotes)+len(s.Pools)+len(s.Mirrors), pool.MaxSetReplicas)
		got, err := pool.ParseSet("x", strings.NewReader(again))
		require.NoError(t, err, again)
		require.Equal(t, s, got)
	})
}
