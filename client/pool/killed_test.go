package pool_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// This file kills programs that have a set open. A program persists one range after the other; range number i, and what is in it, follow from i.

const (
	setBytes = mib + pool.HeaderBytes
	words    = mib / 8
	smallest = pool.MinQueue // of queues: it fills up
	restores = 1<<64 - 1     // in place of a number: the program calls Restore
)

// rangeOf is the range that is persisted as number i, in words. Each word is i then.
func rangeOf(i uint64) (off, n uint64) {
	r := rand.New(rand.NewPCG(1, i))
	n = 1 + r.Uint64N(300)
	if r.IntN(8) == 0 {
		n = 1 + r.Uint64N(12000) // over several parts
	}
	return r.Uint64N(words - n + 1), n
}

// TestMain runs this binary as a program that is killed.
func TestMain(m *testing.M) {
	if url := os.Getenv("QUARRY_TEST_POOL_OWNER"); url != "" {
		if err := ownSet(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// ownSet creates or opens a set and persists ranges. It writes a byte before that, and one behind each answer.
func ownSet(url string) error {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{url}, Transport: client.TransportTCP, Timeout: patience})
	if err != nil {
		return err
	}
	s, err := pool.ReadSet(os.Getenv("QUARRY_TEST_SET"))
	if err != nil {
		return err
	}
	queue, err := strconv.Atoi(os.Getenv("QUARRY_TEST_QUEUE"))
	if err != nil {
		return err
	}
	next, err := strconv.ParseUint(os.Getenv("QUARRY_TEST_NEXT"), 10, 64)
	if err != nil {
		return err
	}
	tell := func() error { _, err := os.Stdout.Write([]byte{'.'}); return err }
	if err := tell(); err != nil {
		return err
	}
	var m *pool.Memory
	if next == restores {
		if _, err := s.Restore(ctx, c, "", nil); err != nil {
			return err
		}
		select {}
	}
	if next == 0 {
		m, err = s.Create(ctx, c, options(false), pool.MemoryOptions{Queue: queue})
		next = 1
	} else {
		m, err = s.Open(ctx, c, pool.MemoryOptions{Queue: queue})
	}
	if err != nil {
		return err
	}
	for i := next; ; i++ {
		if err := tell(); err != nil { // of number i-1
			return err
		}
		persistNumber(m.Bytes(), i)
		off, n := rangeOf(i)
		if err := m.Persist(8*off, 8*n); err != nil {
			return err
		}
	}
}

// persistNumber stores range i.
func persistNumber(memory []byte, i uint64) {
	off, n := rangeOf(i)
	for w := off; w < off+n; w++ {
		binary.LittleEndian.PutUint64(memory[8*w:], i)
	}
}

// killOwner starts a program that goes on with a number, and kills it behind some of its answers and when until is true. It returns how many answers it gave; -1: Open or
// Create had not returned.
func killOwner(t *testing.T, c *testcluster.Cluster, s *pool.Set, queue int, next uint64, behind int, until func() bool) int {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "QUARRY_TEST_POOL_OWNER="+c.Controller.URL(), "QUARRY_TEST_SET="+s.Path, "QUARRY_SSH="+s.SSH, "QUARRY_POOL_AGENT="+s.Agent, fmt.Sprintf("QUARRY_TEST_QUEUE=%d", queue), fmt.Sprintf("QUARRY_TEST_NEXT=%d", next))
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	out := bufio.NewReader(pipe)
	_, err = io.CopyN(io.Discard, out, int64(1+behind))
	require.NoError(t, err)
	require.Eventually(t, until, patience, time.Microsecond)
	require.NoError(t, cmd.Process.Kill())
	rest, err := io.Copy(io.Discard, out)
	require.NoError(t, err)
	_ = cmd.Wait() // it was killed
	return behind + int(rest) - 1
}

// newSet writes a poolset file with a pool, and mirrors. Its folder is in memory if there is one: here processes are killed, and not the machine.
func newSet(t testing.TB, name string, mirrors int) *pool.Set {
	dir, err := os.MkdirTemp("/dev/shm", "quarry-pool-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	text := fmt.Sprintf("PMEMPOOLSET\n%d %s\n", setBytes, filepath.Join(dir, "memory"))
	for i := range mirrors {
		text += fmt.Sprintf("REPLICA\n%d %s\n", setBytes, filepath.Join(dir, fmt.Sprintf("mirror%d", i)))
	}
	path := filepath.Join(dir, name+".set")
	require.NoError(t, os.WriteFile(path, []byte(text+"REPLICA quarry: "+name+"\n"), 0o600))
	s, err := pool.ReadSet(path)
	require.NoError(t, err)
	return s
}

// whenFenced repeats a call until the former owner is fenced.
func whenFenced(t *testing.T, call func() error) error {
	var err error
	require.Eventually(t, func() bool { err = call(); return !errors.Is(err, pool.ErrOpen) }, patience, time.Millisecond)
	return err
}

func atOnce() bool { return true }

func stat(t *testing.T, cl *client.Client) pool.Info {
	i, err := pool.Stat(t.Context(), cl, "ledger")
	require.NoError(t, err)
	return i
}

// model is the memory behind some ranges.
func model(upTo uint64) []uint64 {
	m := make([]uint64, words)
	for i := uint64(1); i <= upTo; i++ {
		off, n := rangeOf(i)
		for w := off; w < off+n; w++ {
			m[w] = i
		}
	}
	return m
}

// matches checks that a memory has all ranges up to one, and of the next one any words.
func matches(t *testing.T, memory []byte, upTo uint64) {
	off, n := rangeOf(upTo + 1)
	for w, want := range model(upTo) {
		got := binary.LittleEndian.Uint64(memory[8*w:])
		if got != want && !(got == upTo+1 && uint64(w) >= off && uint64(w) < off+n) {
			t.Fatalf("word %d is %d: %d is persisted, and %d was being persisted", w, got, want, upTo+1)
		}
	}
}

// newest is the largest word of a memory.
func newest(memory []byte) (top uint64) {
	for w := range words {
		top = max(top, binary.LittleEndian.Uint64(memory[8*w:]))
	}
	return top
}

// TestOwnersAreKilled: a program is killed at any point, again and again. Open gives what it has persisted, word for word, and leaves the replicas alike; Restore into an empty
// folder gives it too, or with a queue all of it up to a point, and what is missing fits into the queue.
func TestOwnersAreKilled(t *testing.T) {
	for _, queue := range []int{0, smallest} {
		for _, mirrors := range []int{0, 1} {
			t.Run(fmt.Sprintf("queue=%d/mirrors=%d", queue, mirrors), func(t *testing.T) {
				t.Parallel()
				killOwners(t, queue, mirrors, false)
			})
		}
		t.Run(fmt.Sprintf("queue=%d/far", queue), func(t *testing.T) {
			t.Parallel()
			killOwners(t, queue, 0, true)
		})
	}
}

func killOwners(t *testing.T, queue, mirrors int, far bool) {
	ctx := t.Context()
	rounds := 12
	if far {
		rounds = 8
	}
	if testing.Short() {
		rounds = 5
		t.Log("-short: fewer rounds")
	}
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{Transport: client.TransportTCP})
	s, from := newSet(t, "ledger", mirrors), "ledger"
	if far {
		byHost(t, c, s)
		from = s.Remotes[0].String()
	}
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Close(ctx))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sure := uint64(0) // the last number that is persisted
	for round := range rounds {
		behind, until := r.IntN(40), atOnce
		switch r.IntN(4) {
		case 0:
			behind = 0 // before it opens the set
		case 1:
			behind, until = 0, func() bool { return stat(t, cl).Owner != 0 } // in the middle of Open
		}
		answers := killOwner(t, c, s, queue, sure+1, behind, until)
		sure += uint64(max(0, answers))
		if lose := round%2 == 1; lose {
			require.NoError(t, os.Remove(s.Part.Path))
			_, err := s.Open(ctx, cl, pool.MemoryOptions{})
			require.ErrorIs(t, err, pool.ErrNoPart)
			i := stat(t, cl)
			for far && i.Owner != 0 { // the agent is at requests of the program
				i = stat(t, cl)
			}
			require.NoError(t, whenFenced(t, func() error { _, err := s.Restore(ctx, cl, from, nil); return err }))
			require.NoFileExists(t, s.Part.Path+pool.Restoring)
			if got := restored(t, s.Part.Path); queue != 0 && !i.Torn {
				top := newest(got)
				require.LessOrEqual(t, top, sure+1)
				lost := uint64(0)
				for i := top + 1; i <= sure; i++ {
					_, n := rangeOf(i)
					lost += 8 * n
				}
				require.LessOrEqual(t, lost, uint64(queue), "%d is the newest of %d", top, sure)
				sure = max(1, top) - 1 // number top may be there in part
				matches(t, got, sure)
			} else if queue == 0 {
				matches(t, got, sure)
			} else {
				sure = 0 // a Sync of a pool behind a queue was killed: it has no order
				continueFresh(t, s, cl, ctx)
				continue
			}
		}
		var m *pool.Memory
		require.NoError(t, whenFenced(t, func() (err error) { m, err = s.Open(ctx, cl, pool.MemoryOptions{}); return err }))
		matches(t, m.Bytes(), sure)
		require.False(t, m.Dirty())
		rep, err := s.Check(ctx, cl, nil)
		require.NoError(t, err)
		require.True(t, rep.Same(), "%+v", rep)
		require.NoError(t, m.Close(ctx))
	}
	require.NoError(t, s.Remove(ctx, cl))
	list, err := pool.List(ctx, cl)
	require.NoError(t, err)
	require.Empty(t, list)
}

// continueFresh makes the set again.
func continueFresh(t *testing.T, s *pool.Set, cl *client.Client, ctx context.Context) {
	require.NoError(t, s.Remove(ctx, cl))
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	require.NoError(t, m.Close(ctx))
}

// restored is the memory in a file.
func restored(t *testing.T, path string) []byte {
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b[pool.HeaderBytes:]
}

// TestKilledInCreate: what is left is removed, and the set can be made again.
func TestKilledInCreate(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	// Each holds from some moment on.
	for i, until := range []func(s *pool.Set) bool{
		func(*pool.Set) bool { return true },
		func(s *pool.Set) bool { return s.Info()[0].State != pool.Missing },
		func(s *pool.Set) bool { return s.Info()[1].State != pool.Missing },
		func(s *pool.Set) bool { _, err := pool.Stat(ctx, cl, s.Pools[0]); return err == nil },
		func(s *pool.Set) bool {
			i, err := pool.Stat(ctx, cl, s.Pools[0])
			return err == nil && i.State == pool.Ready
		},
	} {
		s := newSet(t, fmt.Sprintf("ledger%d", i), 1)
		answers := killOwner(t, c, s, 0, 0, 0, func() bool { return until(s) })
		if err := whenFenced(t, func() error { return s.Remove(ctx, cl) }); errors.Is(err, pool.ErrNoPart) { // the first file was not there yet
			require.Negative(t, answers)
		} else {
			require.NoError(t, err)
		}
		for _, i := range s.Info() {
			require.Equal(t, pool.Missing, i.State)
		}
		var m *pool.Memory
		require.Eventually(t, func() (done bool) {
			var err error
			if m, err = s.Create(ctx, cl, options(false), pool.MemoryOptions{}); err == nil {
				return true
			}
			// The controller has carried out late what the program that was killed had asked for.
			if err := pool.Remove(ctx, cl, s.Pools[0]); err != nil {
				t.Log(err)
			}
			return false
		}, patience, time.Millisecond)
		require.NoError(t, m.Close(ctx))
	}
}

// TestKilledInRestore: a Restore that is killed leaves no local part, or a whole one, and can be made again.
func TestKilledInRestore(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{})
	s := newSet(t, "ledger", 0)
	m, err := s.Create(ctx, cl, options(false), pool.MemoryOptions{})
	require.NoError(t, err)
	persistNumber(m.Bytes(), 1)
	require.NoError(t, m.Persist(0, mib))
	require.NoError(t, m.Close(ctx))
	isThere := func(path string) bool { _, err := os.Stat(path); return err == nil }
	for _, until := range []func() bool{
		atOnce,
		func() bool { return isThere(s.Part.Path) || isThere(s.Part.Path+pool.Restoring) },
		func() bool { return isThere(s.Part.Path) || stat(t, cl).Owner != 0 },
		func() bool { return isThere(s.Part.Path) },
	} {
		require.NoError(t, os.Remove(s.Part.Path))
		killOwner(t, c, s, 0, restores, 0, until)
		if !isThere(s.Part.Path) {
			require.NoError(t, whenFenced(t, func() error { _, err := s.Restore(ctx, cl, "", nil); return err }))
			require.NoFileExists(t, s.Part.Path+pool.Restoring)
		}
		require.NoError(t, whenFenced(t, func() (err error) { m, err = s.Open(ctx, cl, pool.MemoryOptions{}); return err }))
		matches(t, m.Bytes(), 1)
		require.NoError(t, m.Close(ctx))
	}

	// What is not Restore's is not removed.
	foreign := s.Part.Path + pool.Restoring
	require.NoError(t, os.WriteFile(foreign, []byte("of somebody else"), 0o600))
	require.NoError(t, os.Remove(s.Part.Path))
	_, err = s.Restore(ctx, cl, "", nil)
	require.ErrorIs(t, err, pool.ErrMismatch)
	require.FileExists(t, foreign)
}
