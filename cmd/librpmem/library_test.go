package main

import (
	"bufio"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/testbinary"
)

// kit is the library, as users build it, a cluster, and a command in ssh's place that runs the agent on this host.
type kit struct {
	dir     string // librpmem.so.1, ssh
	quarry  string
	cluster *local.Cluster
}

func newKit(t *testing.T) *kit {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed: apt-get install gcc libc6-dev")
	}
	k := &kit{dir: t.TempDir(), quarry: filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")}
	run(t, nil, "sh", "build.sh", k.dir)
	require.NoError(t, os.WriteFile(filepath.Join(k.dir, "ssh"), []byte("#!/bin/sh\nshift\nexec sh -c \"$*\"\n"), 0o700))
	var err error
	k.cluster, err = local.Start(t.Context(), local.Config{Binary: k.quarry, Nodes: 1, RegionBytes: "64MiB", Lease: "2s"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.cluster.Stop()) })
	return k
}

// env has a program find the library and the cluster.
func (k *kit) env() []string {
	return append(os.Environ(), "QUARRY_CONTROLLER="+k.cluster.URL, "LD_LIBRARY_PATH="+k.dir+":"+os.Getenv("LD_LIBRARY_PATH"), "PMEM_IS_PMEM_FORCE=1",
		"QUARRY_POOL_CREATE_REPLICAS=1", "QUARRY_SSH="+filepath.Join(k.dir, "ssh"), "QUARRY_POOL_AGENT=exec "+k.quarry+" pool-agent -C "+k.cluster.URL)
}

func compile(t *testing.T, source string) (program string) {
	program = filepath.Join(t.TempDir(), "program")
	run(t, nil, "gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-pthread", "-o", program, filepath.Join("testdata", source), "-ldl")
	return program
}

func run(t *testing.T, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = env
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		require.NoError(t, err, "%s %v: %s%s", name, args, out, exit.Stderr)
	}
	require.NoError(t, err)
	return string(out)
}

func TestLibrary(t *testing.T) {
	k := newKit(t)
	t.Run("Symbols", k.symbols)
	t.Run("Prototypes", func(t *testing.T) {
		program := compile(t, "pool.c")
		for _, target := range []string{pool.Cluster, "ops@far.example.com"} {
			require.Equal(t, "all is there\n", run(t, k.env(), program, target, "ledger"))
		}
	})
	t.Run("Objects", k.objects)
}

// symbols: the library exports what librpmem 1.3 does, under its version, and nothing else.
func (k *kit) symbols(t *testing.T) {
	f, err := elf.Open(filepath.Join(k.dir, "librpmem.so.1"))
	require.NoError(t, err)
	defer f.Close()
	dynamic, err := f.DynamicSymbols()
	require.NoError(t, err)
	var exported []string
	for _, s := range dynamic {
		if s.Section != elf.SHN_UNDEF && s.Name != "LIBRPMEM_1.0" {
			exported = append(exported, s.Name)
			require.Equal(t, "LIBRPMEM_1.0", s.Version)
		}
	}
	slices.Sort(exported)
	kept, err := os.ReadFile(filepath.Join("testdata", "symbols.txt"))
	require.NoError(t, err)
	require.Equal(t, strings.Fields(string(kept)), exported)
	soname, err := f.DynString(elf.DT_SONAME)
	require.NoError(t, err)
	require.Equal(t, []string{"librpmem.so.1"}, soname)
}

// objects: a program on libpmemobj replicates into the cluster without a change. It is killed at random, goes on, and loses its file.
func (k *kit) objects(t *testing.T) {
	program := compile(t, "objects.c")
	dir := t.TempDir()
	for _, target := range []string{pool.Cluster, "ops@far.example.com"} {
		set, part := filepath.Join(dir, "set"), filepath.Join(dir, "part")
		require.NoError(t, os.WriteFile(set, fmt.Appendf(nil, "PMEMPOOLSET\n16M %s\nREPLICA %s objects\n", part, target), 0o600))
		counted, command := 0, "create"
		for range 3 {
			counted = k.killed(t, program, set, command, counted)
			command = "count"
		}
		require.Positive(t, counted)
		// The pool has the root object as the program's file has it. Other bytes of the file are of the process alone.
		c := k.connect(t)
		_, begin, end := k.read(t, program, set)
		memory, err := os.ReadFile(part)
		require.NoError(t, err)
		p, err := pool.OpenBare(t.Context(), c, "objects")
		require.NoError(t, err)
		there := make([]byte, len(memory))
		require.NoError(t, p.Read(there, 0))
		require.NoError(t, p.Close(t.Context()))
		require.Equal(t, memory[begin:end], there[begin:end])
		signature := p.Attr().Signature
		require.Equal(t, "PMEMOBJ\x00", string(signature[:]))
		if tool, err := exec.LookPath("pmempool"); err != nil {
			t.Log("pmempool is not installed (apt-get install pmdk-tools): the lost file is not made again")
		} else {
			require.NoError(t, os.Remove(part))
			run(t, k.env(), tool, "sync", set)
			again, _, _ := k.read(t, program, set)
			require.Equal(t, counted, again)
		}
		require.NoError(t, pool.Remove(t.Context(), c, "objects"))
		require.NoError(t, c.Close())
		require.NoError(t, os.Remove(part))
	}
}

func (k *kit) connect(t *testing.T) *client.Client {
	c, err := client.Connect(context.Background(), client.Config{Controllers: []string{k.cluster.URL}})
	require.NoError(t, err)
	return c
}

// read is how many transactions the program finds, and where the root object is. What runs in ssh's place may have the lock of the file from a program that was killed,
// until it notices that; ssh itself closes such files.
func (k *kit) read(t *testing.T, program, set string) (count, begin, end int) {
	var out, text []byte
	require.Eventually(t, func() bool {
		cmd := exec.CommandContext(t.Context(), program, set, "read")
		cmd.Env = k.env()
		var err error
		out, err = cmd.Output()
		text = nil
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			text = exit.Stderr
		}
		return !strings.Contains(string(text), "Resource temporarily unavailable")
	}, 3*time.Minute, time.Millisecond)
	_, err := fmt.Sscan(string(out), &count, &begin, &end)
	require.NoError(t, err, "%s", text)
	return count, begin, end
}

// killed runs the program, kills it behind some of its transactions, and checks that those which it has told are there, and at most one more.
func (k *kit) killed(t *testing.T, program, set, command string, before int) (counted int) {
	cmd := exec.Command(program, set, command)
	cmd.Env = k.env()
	var text strings.Builder
	cmd.Stderr = &text
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	out := bufio.NewReader(pipe)
	read := 2 + rand.IntN(2000)
	_, err = io.CopyN(io.Discard, out, int64(read))
	if err != nil {
		_ = cmd.Wait()
		if cmd.ProcessState.ExitCode() == 77 {
			t.Skip("libpmemobj is not installed: apt-get install libpmemobj1: " + text.String())
		}
		require.NoError(t, err, text.String())
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGKILL))
	rest, err := io.Copy(io.Discard, out)
	require.NoError(t, err)
	_ = cmd.Wait() // it was killed
	counted, _, _ = k.read(t, program, set)
	told := before + read + int(rest) - 1 // the last dot is that of a transaction which may not be committed
	require.True(t, counted == told || counted == told+1, "%d, behind %d", counted, told)
	return counted
}

// TestErrnos: each error has its errno, and one whose outcome is not known no other.
func TestErrnos(t *testing.T) {
	for _, e := range errnos {
		require.Equal(t, e.is, errnoOf(fmt.Errorf("x: %w", e.err)))
		require.Equal(t, syscall.ECONNRESET, errnoOf(fmt.Errorf("%w: %w", client.ErrUnknown, e.err)))
	}
	require.Equal(t, syscall.EIO, errnoOf(errors.New("else")))
}

// TestNumbersOfPools: a number that is closed or made up is refused.
func TestNumbersOfPools(t *testing.T) {
	n := add(&opened{lanes: 2, local: make([]byte, 2*headerBytes)})
	o, err := find(n)
	require.NoError(t, err)
	for _, x := range [][3]uint64{{headerBytes - 1, 1, 0}, {headerBytes, headerBytes + 1, 0}, {2*headerBytes + 1, 0, 0}, {headerBytes, 1<<64 - 1, 0}, {headerBytes, 1, 2}} {
		require.ErrorIs(t, o.persist(x[0], x[1], uint(x[2]), false), client.ErrArgument)
	}
	_, err = take(n)
	require.NoError(t, err)
	_, err = take(n)
	require.ErrorIs(t, err, errHandle)
	_, err = find(n)
	require.ErrorIs(t, err, errHandle)
	_, err = find(n + 16)
	require.ErrorIs(t, err, errHandle)
}
