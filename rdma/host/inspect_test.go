package host

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Threads that share a table of files cost one look through it; a thread with a table of its own is looked through, too.
func TestTablesOfFilesAreLookedThroughOnce(t *testing.T) {
	m, err := NewMemory("looked for", 1<<20)
	require.NoError(t, err)
	defer m.Close()
	if !shareFiles(os.Getpid(), os.Getpid()) {
		t.Skip("kcmp(2) is not permitted here: each thread is looked through")
	}
	stop := make(chan struct{})
	defer close(stop)
	for range 8 {
		began := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(began)
			<-stop
		}()
		<-began
	}
	tasks, err := names("/proc/self/task")
	require.NoError(t, err)
	require.Greater(t, len(tasks), 8)
	// tables looks through this process until it has seen as many tables of files: a thread that is about to end has none, and counts.
	tables := func(m *Memory, want int) {
		require.EventuallyWithT(t, func(t *assert.CollectT) {
			s, err := newSight([]*Memory{m})
			require.NoError(t, err)
			held, _, err := s.look(os.Getpid(), true)
			require.NoError(t, err)
			require.Equal(t, []*Memory{m}, held)
			require.Equal(t, want, s.tables)
		}, time.Minute, time.Millisecond)
	}
	tables(m, 1)

	// A copy of the descriptor in the table of one thread, which the table of all others does not have.
	other, err := NewMemory("kept by a thread", 1<<20)
	require.NoError(t, err)
	began, ended := make(chan error), make(chan struct{})
	leave := make(chan struct{})
	var unshare func()
	unshare = func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			go unshare() // the main thread would not end, and keep its table
			<-leave
			runtime.UnlockOSThread()
			return
		}
		defer close(ended)
		began <- unix.Unshare(unix.CLONE_FILES)
		<-leave
	}
	go unshare()
	require.NoError(t, <-began)
	_, err = other.identity()
	require.NoError(t, err)
	require.NoError(t, other.Close())
	tables(other, 2)
	close(leave)
	<-ended
}
