package main

import (
	"bufio"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/uffd"
	"github.com/quarrystore/quarry/verify/testbinary"
)

// A kit is the library, as users build it, and a cluster.
type kit struct {
	dir     string // libquarry.so.1, quarry.h, quarry.pc
	cluster *local.Cluster
}

func newKit(t testing.TB) *kit {
	for _, tool := range []string{"gcc", "pkg-config"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(tool + " is not installed: apt-get install gcc libc6-dev pkg-config")
		}
	}
	k := &kit{dir: t.TempDir()}
	run(t, nil, "sh", "build.sh", k.dir, "v1.2.3-test")
	bin := testbinary.Build(t, "./cmd/quarry", "./examples/...")
	var err error
	k.cluster, err = local.Start(t.Context(), local.Config{Binary: filepath.Join(bin, "quarry"), Nodes: 1, RegionBytes: "64MiB", Lease: "30s"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.cluster.Stop()) })
	return k
}

// env has a program use the cluster and the library.
func (k *kit) env() []string {
	return append(os.Environ(), "QUARRY_CONTROLLER="+k.cluster.URL, "LIBQUARRY="+filepath.Join(k.dir, "libquarry.so.1"),
		"PKG_CONFIG_PATH="+k.dir, "PYTHONDONTWRITEBYTECODE=1")
}

// compile builds a C program with the flags of quarry.pc.
func (k *kit) compile(t testing.TB, source string, flags ...string) (program string) {
	t.Helper()
	pc := strings.Fields(run(t, k.env(), "pkg-config", "--cflags", "--libs", "quarry"))
	program = filepath.Join(t.TempDir(), "program")
	args := append([]string{"-Wall", "-Wextra", "-Werror", "-O2", "-o", program, source}, flags...)
	run(t, nil, "gcc", append(args, pc...)...)
	return program
}

func run(t testing.TB, env []string, name string, args ...string) string {
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
	t.Run("ExampleInC", func(t *testing.T) {
		hello := k.compile(t, filepath.Join("..", "..", "examples", "c", "main.c"), "-std=c11", "-pedantic")
		require.Equal(t, "42 at version 2\nlate: conflict\nada = king\nalan = turing\n", run(t, k.env(), hello))
	})
	t.Run("ExampleInPython", func(t *testing.T) {
		if _, err := exec.LookPath("python3"); err != nil {
			t.Skip("python3 is not installed: apt-get install python3")
		}
		require.Equal(t, "10800 bytes\nfreed: True\n['ada', 'alan']\nFalse turing\n",
			run(t, k.env(), "python3", filepath.Join("..", "..", "examples", "python", "main.py")))
	})
	t.Run("HeaderIsCxx", func(t *testing.T) {
		source := filepath.Join(t.TempDir(), "a.cc")
		require.NoError(t, os.WriteFile(source, []byte("#include <quarry.h>\n#include <cstdio>\nint main() { std::puts(quarry_version()); }\n"), 0o600))
		if _, err := exec.LookPath("g++"); err != nil {
			t.Skip("g++ is not installed: apt-get install g++")
		}
		require.Equal(t, "v1.2.3-test\n", run(t, nil, k.compile(t, source, "-std=c++11")))
	})
	t.Run("BadInput", func(t *testing.T) {
		require.Equal(t, "refused\n", run(t, k.env(), k.compile(t, filepath.Join("testdata", "bad.c"), "-std=c11")))
	})
	t.Run("Threads", func(t *testing.T) {
		threads := k.compile(t, filepath.Join("testdata", "threads.c"), "-pthread")
		for _, transport := range []string{"shm", "tcp"} {
			env := append(k.env(), "QUARRY_FABRIC="+transport)
			require.Equal(t, "1600\n", run(t, env, threads, "8", "200"))
			require.Equal(t, "1600\n", run(t, env, threads, "16", "100", "keys"))
		}
	})
	t.Run("Spaces", k.spaces)
	t.Run("Version", func(t *testing.T) {
		require.Equal(t, "1.2.3-test\n", run(t, k.env(), "pkg-config", "--modversion", "quarry"))
	})
}

// A program in C and this one share a space, by way of one pager.
func (k *kit) spaces(t *testing.T) {
	fd, _, err := uffd.Open()
	if err != nil {
		t.Skip("page faults cannot be served here: ", err)
	}
	unix.Close(fd)
	socket := filepath.Join(t.TempDir(), "pager")
	pager, err := local.Spawn(t.Context(), filepath.Join(testbinary.Build(t, "./cmd/quarry", "./examples/..."), "quarry"), "pager", "-C", k.cluster.URL, "--socket", socket, "--memory", "1MiB")
	require.NoError(t, err)
	defer func() { require.NoError(t, pager.Stop(), pager.Log()) }()
	cmd := exec.CommandContext(t.Context(), k.compile(t, filepath.Join("testdata", "spaces.c"), "-std=gnu11"))
	cmd.Env = append(k.env(), "QUARRY_PAGER_SOCKET="+socket)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	out := bufio.NewReader(stdout)
	line, err := out.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "mapped\n", line)

	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{k.cluster.URL}})
	require.NoError(t, err)
	defer c.Close()
	s, err := space.Open(t.Context(), c, "c")
	require.NoError(t, err)
	m, err := vmm.Map(t.Context(), s, s.Base(), s.Bytes(), vmm.Release, vmm.Options{Socket: socket, Command: []string{}})
	require.NoError(t, err)
	require.Equal(t, "virtual bytes", string(m.Bytes()[100:113]))
	require.EqualValues(t, 42, m.Bytes()[4*vmm.PageBytes])
	m.Bytes()[5*vmm.PageBytes] = 7
	require.NoError(t, m.Close())

	rest, err := io.ReadAll(out)
	require.NoError(t, err)
	require.Equal(t, "shared\n", string(rest))
	require.NoError(t, cmd.Wait())
}

// What the library exports is what quarry.h declares and what symbols.txt has kept: a symbol that is gone
// from it breaks programs.
func (k *kit) symbols(t *testing.T) {
	f, err := elf.Open(filepath.Join(k.dir, "libquarry.so.1"))
	require.NoError(t, err)
	defer f.Close()
	dynamic, err := f.DynamicSymbols()
	require.NoError(t, err)
	var exported []string
	for _, s := range dynamic {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) != elf.STT_OBJECT && s.Name != "QUARRY_1" {
			exported = append(exported, s.Name)
		}
	}
	slices.Sort(exported)

	header, err := os.ReadFile("quarry.h")
	require.NoError(t, err)
	var declared []string
	for _, m := range regexp.MustCompile(`(?m)^(?:int|void|const char \*) ?(quarry_\w+)\(`).FindAllStringSubmatch(string(header), -1) {
		declared = append(declared, m[1])
	}
	slices.Sort(declared)
	require.Equal(t, declared, exported)

	kept, err := os.ReadFile(filepath.Join("testdata", "symbols.txt"))
	require.NoError(t, err)
	require.Equal(t, strings.Fields(string(kept)), exported)
	page, err := os.ReadFile("quarry.3")
	require.NoError(t, err)
	for _, name := range exported {
		require.Regexp(t, name+`\b`, string(page), "the manual page")
	}
	soname, err := f.DynString(elf.DT_SONAME)
	require.NoError(t, err)
	require.Equal(t, []string{"libquarry.so.1"}, soname)
}

func TestHandles(t *testing.T) {
	table := table[int]{kind: 3}
	numbers := make([]uint64, maxHandles)
	for i := range numbers {
		var err error
		numbers[i], err = table.add(i)
		require.NoError(t, err)
	}
	_, err := table.add(0)
	require.ErrorIs(t, err, errHandles)
	for i, n := range numbers {
		got, err := table.get(n)
		require.NoError(t, err)
		require.Equal(t, i, got)
		for _, other := range []uint64{n + 1<<12, n ^ 1<<56, 0, ^uint64(0)} {
			_, err := table.get(other)
			require.ErrorIs(t, err, errHandle, "%x", other)
		}
	}
	got, err := table.remove(numbers[7])
	require.NoError(t, err)
	require.Equal(t, 7, got)
	_, err = table.remove(numbers[7])
	require.ErrorIs(t, err, errHandle)
	again, err := table.add(70)
	require.NoError(t, err)
	require.NotEqual(t, numbers[7], again, "the slot is used again, the number is not")
	_, err = table.get(numbers[7])
	require.ErrorIs(t, err, errHandle)
	table.removeIf(func(n int) bool { return n != 70 })
	_, err = table.get(numbers[8])
	require.ErrorIs(t, err, errHandle)
	_, err = table.get(again)
	require.NoError(t, err)
}

func TestAnswers(t *testing.T) {
	for _, r := range reasons {
		answer, why := answerOf(fmt.Errorf("reading: %w", r.err))
		require.Equal(t, r.is, why, r.err)
		require.Equal(t, map[bool]int{true: unknown, false: notDone}[r.is == reasonLostAnswer], answer, r.err)
		answer, why = answerOf(fmt.Errorf("%w: %w", client.ErrUnknown, r.err))
		require.Equal(t, unknown, answer, r.err)
		require.Equal(t, reasonLostAnswer, why, r.err)
	}
	answer, why := answerOf(errors.New("something else"))
	require.Equal(t, notDone, answer)
	require.Equal(t, reasonOther, why)
	answer, why = answerOf(nil)
	require.Equal(t, done, answer)
	require.Equal(t, reasonNone, why)
	require.ErrorIs(t, worst([]error{nil, client.ErrFreed, client.ErrUnknown, client.ErrBusy}), client.ErrUnknown)
	require.ErrorIs(t, worst([]error{nil, client.ErrFreed, client.ErrBusy}), client.ErrFreed)
	require.NoError(t, worst([]error{nil, nil}))
}

// BenchmarkRead compares quarry_read with Client.Read of the same object, in turns: medians of slices.
func BenchmarkRead(b *testing.B) {
	k := newKit(b)
	speed := k.compile(b, filepath.Join("testdata", "speed.c"))
	c, err := client.Connect(b.Context(), client.Config{Controllers: []string{k.cluster.URL}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(b, err)
	defer func() { require.NoError(b, c.Close()) }()
	ref, err := c.Alloc(b.Context(), make([]byte, 128), client.AllocOptions{})
	require.NoError(b, err)
	const slices, each = 100, 2000
	var inC, inGo []float64
	for range b.N {
		out := run(b, k.env(), speed, strconv.Itoa(slices*each), fmt.Sprintf("%x", uint64(ref.Addr)), fmt.Sprintf("%x", uint64(ref.Incarnation)))
		ns, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
		require.NoError(b, err)
		inC = append(inC, ns)
		inGo = append(inGo, readInGo(b, c, ref, slices, each))
	}
	b.ReportMetric(median(inC), "c-ns/read")
	b.ReportMetric(median(inGo), "go-ns/read")
	b.ReportMetric(median(inC)-median(inGo), "more-ns/read")
}

func readInGo(b *testing.B, c *client.Client, ref client.Ref, slices, each int) float64 {
	var took []float64
	buffer := make([]byte, 0, 128)
	for range slices {
		began := time.Now()
		for range each {
			if _, err := c.Read(context.Background(), ref, buffer); err != nil {
				b.Fatal(err)
			}
		}
		took = append(took, float64(time.Since(began).Nanoseconds())/float64(each))
	}
	return median(took)
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}
