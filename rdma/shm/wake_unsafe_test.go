package shm_test

import (
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const (
	wokenRole = "woken"
	wakePause = 500 * time.Microsecond
	// futexWait and futexWake are FUTEX_WAIT and FUTEX_WAKE of linux/futex.h. The words are shared by processes.
	futexWait, futexWake = 0, 1
	answerOff            = 128
)

func wakeWord(mem []byte, off int) *uint32 { return (*uint32)(unsafe.Pointer(&mem[off])) }

// awaitWord sleeps until a word has a value.
func awaitWord(p *uint32, want uint32) {
	for now := atomic.LoadUint32(p); now != want; now = atomic.LoadUint32(p) {
		unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p)), futexWait, uintptr(now), 0, 0, 0)
	}
}

// setWord stores a word and wakes who sleeps until it changes.
func setWord(p *uint32, to uint32) {
	atomic.StoreUint32(p, to)
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p)), futexWake, 1, 0, 0, 0)
}

// woken answers each wake with one, until it is killed.
func woken(mem []byte) {
	for i := uint32(1); ; i++ {
		awaitWord(wakeWord(mem, 0), i)
		setWord(wakeWord(mem, answerOff), i)
	}
}

// BenchmarkFutexWake is the yardstick of messages to a node that sleeps: a bare wake of another process, which sleeps in the kernel, and
// its wake in return. Both have slept before each one.
func BenchmarkFutexWake(b *testing.B) {
	fd, err := unix.MemfdCreate("wake", unix.MFD_CLOEXEC)
	require.NoError(b, err)
	f := os.NewFile(uintptr(fd), "wake")
	defer f.Close()
	require.NoError(b, f.Truncate(int64(os.Getpagesize())))
	mem, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(b, err)
	defer unix.Munmap(mem)
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "QUARRY_TEST_CLIENT="+wokenRole)
	cmd.ExtraFiles = []*os.File{f}
	require.NoError(b, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	took := make([]time.Duration, 0, b.N)
	var i uint32
	trip := func() {
		i++
		setWord(wakeWord(mem, 0), i)
		awaitWord(wakeWord(mem, answerOff), i)
	}
	trip() // the process has started
	for b.Loop() {
		time.Sleep(wakePause)
		start := time.Now()
		trip()
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
	b.ReportMetric(float64(took[0].Nanoseconds()), "fastest-ns")
	b.ReportMetric(0, "ns/op") // has the pauses
}
