//go:build cgo && verbs

package verbs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A server that is closed waits for goroutines that lock it once more before they end, such as a flusher that has just begun.
func TestCloseWaitsUnlocked(t *testing.T) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(wake)
	s := &Server{device: new(device), wake: wake, regions: make(map[uint32]*region), asks: newTurns[*lane](), hashes: newTurns[*lane](), chains: newTurns[*lane](), slow: newTurns[*lane]()}
	s.drained.Go(func() {
		var b [8]byte
		unix.Read(wake, b[:]) // the server waits, or will
		s.region(1)
	})
	done := make(chan struct{})
	go func() {
		s.quiet()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(guard):
		t.Fatal("the goroutine and the server wait for each other")
	}
	require.Contains(t, s.regions, uint32(1))
}
