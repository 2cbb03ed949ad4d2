package futex

import (
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// A process of this binary answers wakes of the tests below.
func TestMain(m *testing.M) {
	if os.Getenv("QUARRY_TEST_SLEEPER") != "" {
		os.Exit(sleeper())
	}
	goleak.VerifyTestMain(m)
}

// patience bounds a sleep that a test ends: only a test that fails comes to it.
const patience = 2 * time.Minute

// ends fails if a sleep does not end before its time is up.
func ends(t *testing.T, sleep func()) {
	t.Helper()
	began := clock.Now()
	sleep()
	require.Less(t, clock.Now()-began, int64(patience), "a wake-up was lost")
}

// What is rung or stored between the look and the sleep ends the sleep, and so does what comes while the thread sleeps.
func TestHazard315_WakeUpBetweenLookAndSleep(t *testing.T) {
	if !Supported() {
		t.Skip("futex_waitv needs Linux 5.16, and a sandbox that lets it pass")
	}
	var b Bell
	var word atomic.Uint32
	at := wordOf(&word)
	ends(t, func() {
		seen := b.Seen()
		b.Ring()
		b.Wait(seen, at, 0, patience)
	})
	ends(t, func() {
		seen := word.Load()
		word.Add(1)
		Wake(at)
		b.Wait(b.Seen(), at, seen, patience)
	})
	ends(t, func() {
		seen := word.Load()
		word.Add(1)
		Wake(at)
		Wait(at, seen, patience)
	})
	for range 200 {
		turn := make(chan func())
		go func() {
			for wake := range turn {
				for !b.asleep.Load() {
					runtime.Gosched()
				}
				wake()
			}
		}()
		ends(t, func() {
			seen := b.Seen()
			turn <- b.Ring
			for b.Seen() == seen { // a sleep may end early
				b.Wait(seen, at, word.Load(), patience)
			}
		})
		ends(t, func() {
			seen := word.Load()
			turn <- func() { word.Add(1); Wake(at) }
			for word.Load() == seen { // a sleep may end early
				b.Wait(b.Seen(), at, seen, patience)
			}
		})
		close(turn)
	}
}

// sleeper answers each wake with one, sleeping by Wait and by Bell.Wait in turn.
func sleeper() int {
	mem, err := mapShared(3)
	if err != nil {
		return 1
	}
	var b Bell
	question, answer := at(mem, 0), at(mem, 64)
	for i := range uint32(wakes) {
		for began := clock.Now(); atomic.LoadUint32(question) == i; {
			if clock.Now()-began >= int64(patience) {
				return 2
			}
			if i%2 == 0 {
				Wait(question, i, patience)
			} else {
				b.Wait(b.Seen(), question, i, patience)
			}
		}
		atomic.StoreUint32(answer, i+1)
		Wake(answer)
	}
	return 0
}

const wakes = 200

// Threads of two processes wake each other.
func TestProcessesWakeEachOther(t *testing.T) {
	fd, err := unix.MemfdCreate("words", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "words")
	defer f.Close()
	require.NoError(t, f.Truncate(int64(os.Getpagesize())))
	mem, err := mapShared(fd)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "QUARRY_TEST_SLEEPER=1")
	cmd.ExtraFiles = []*os.File{f}
	require.NoError(t, cmd.Start())
	question, answer := at(mem, 0), at(mem, 64)
	ends(t, func() {
		for i := range uint32(wakes) {
			atomic.StoreUint32(question, i+1)
			Wake(question)
			for atomic.LoadUint32(answer) == i && t.Context().Err() == nil {
				Wait(answer, i, patience)
			}
		}
	})
	require.NoError(t, cmd.Wait())
}

func mapShared(fd int) ([]byte, error) {
	return unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// A sleep has an end also where nothing wakes it, and where the memory has gone.
func TestSleepsAreBounded(t *testing.T) {
	var b Bell
	var word atomic.Uint32
	b.Wait(b.Seen(), wordOf(&word), 0, time.Millisecond)
	Wait(wordOf(&word), 0, time.Millisecond)
	Wake(nowhere())
	Wait(nowhere(), 0, patience)
	ends(t, func() { b.Wait(b.Seen(), nowhere(), 0, patience) })
}

// So many threads sleep at a time, and fewer than there are processors have begun to a moment ago.
func TestHazard316_ThreadsThatSleepAreBounded(t *testing.T) {
	var c count
	_, ok := c.take(5, 1)
	require.False(t, ok, "the only processor")
	first, ok := c.take(5, 2)
	require.True(t, ok)
	_, ok = c.take(5+int64(handover)-1, 2)
	require.False(t, ok, "the scheduler may keep a processor for the other one")
	second, ok := c.take(5+int64(handover), 2)
	require.True(t, ok)
	first.Give()
	second.Give()
	var taken []Thread
	for i := range maxThreads {
		one, ok := c.take(int64(i), 1000)
		require.True(t, ok)
		taken = append(taken, one)
	}
	_, ok = c.take(int64(time.Hour), 1000)
	require.False(t, ok)
	taken[7].Give()
	_, ok = c.take(int64(time.Hour), 1000)
	require.True(t, ok)
}

func TestNoAllocations(t *testing.T) {
	var b Bell
	var word atomic.Uint32
	at := wordOf(&word)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		Wait(at, 1, time.Second)
		b.Wait(b.Seen(), at, 1, time.Second)
		b.Ring()
		Wake(at)
	}))
}
