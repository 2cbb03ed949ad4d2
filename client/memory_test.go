package client_test

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// memory is the process's address space and its anonymous resident memory, in bytes.
func memory(t *testing.T) (size, resident int) {
	runtime.GC()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		var n int
		if _, err := fmt.Sscanf(line, "VmSize: %d kB", &n); err == nil {
			size = n << 10
		}
		if _, err := fmt.Sscanf(line, "RssAnon: %d kB", &n); err == nil {
			resident = n << 10
		}
	}
	require.NotZero(t, size)
	return size, resident
}

// TestSessionsReturnTheirMemory: connecting and closing, and sessions that end and are
// replaced, leave neither address space nor resident memory.
func TestSessionsReturnTheirMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("opens two hundred sessions, one after the other; not with -short")
	}
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	use := func(c *client.Client) error {
		ref, err := c.Alloc(ctx, make([]byte, 600<<10), client.AllocOptions{})
		if err == nil {
			_, err = c.Read(ctx, ref, nil)
		}
		if err == nil {
			err = c.Free(ctx, ref)
		}
		return err
	}
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		once := func() {
			c := cluster.Connect(client.Config{Transport: transport})
			require.NoError(t, use(c))
			require.NoError(t, c.Close())
		}
		lasting := cluster.Connect(client.Config{Transport: transport})
		replaced := func() {
			require.NoError(t, use(lasting))
			id := lasting.SessionID()
			_, err := cluster.Control().RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: id, Reason: "test"}))
			require.NoError(t, err)
			for use(lasting) != nil || lasting.SessionID() == id {
			}
		}
		for i, f := range []func(){once, replaced} {
			t.Run(transport+[]string{" closed", " replaced"}[i], func(t *testing.T) {
				const times = 24
				for range 6 {
					f()
				}
				most := times << 19
				if raceEnabled {
					t.Log("the race detector's shadow of what was touched stays: a higher bound")
					most *= 8
				}
				size, resident := memory(t)
				for range times {
					f()
				}
				// Each session was 2 GiB and 600 KiB at least. One that is replaced returns its
				// memory a little later.
				require.Eventually(t, func() bool {
					size2, resident2 := memory(t)
					t.Logf("address space %+d MiB, resident %+d KiB", (size2-size)>>20, (resident2-resident)>>10)
					return size2-size < times<<30 && resident2-resident < most
				}, patience, 50*time.Millisecond)
			})
		}
		require.NoError(t, lasting.Close())
	}
}

// TestMemoryOutlivesACallback: a callback that goes on after Close has its payload.
func TestMemoryOutlivesACallback(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	ref, err := c.Alloc(ctx, []byte("payload"), client.AllocOptions{})
	require.NoError(t, err)
	inside, closed, done := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		done <- c.View(ctx, ref, func(b []byte) error {
			close(inside)
			<-closed
			require.Equal(t, "payload", string(b))
			return nil
		})
	}()
	<-inside
	_ = client.CloseWithin(c, time.Millisecond) // what it waits for cannot end yet
	require.Equal(t, 1, client.Disposing(c))
	close(closed)
	require.NoError(t, <-done)
	require.Eventually(t, func() bool { return client.Disposing(c) == 0 }, patience, time.Millisecond)
}
