package host

import (
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Threads that share a table of files cost one look through it; a thread with a table of its own is looked through, too.
func TestTablesOfFilesAreLookedThroughOnce(t *testing.T) {
	m, err := NewMemory("looked for", 1<<20)
	require.NoError(t, err)
	defer m.Close()
	s, err := newSight([]*Memory{m})
	require.NoError(t, err)
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
	held, _, err := s.look(os.Getpid(), true)
	require.NoError(t, err)
	require.Equal(t, []*Memory{m}, held, "the mapping of this process")
	require.Equal(t, 1, s.tables)

	// A copy of the descriptor in the table of one thread, which the table of all others does not have.
	other, err := NewMemory("kept by a thread", 1<<20)
	require.NoError(t, err)
	began, ended := make(chan error), make(chan struct{})
	leave := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_FILES)
		began <- err
		<-leave
	}()
	require.NoError(t, <-began)
	s, err = newSight([]*Memory{other})
	require.NoError(t, err)
	require.NoError(t, other.Close())
	held, _, err = s.look(os.Getpid(), true)
	require.NoError(t, err)
	require.Equal(t, []*Memory{other}, held, "in the thread's own table")
	require.Equal(t, 2, s.tables)
	close(leave)
	<-ended
}
