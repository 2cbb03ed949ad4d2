package tcp

import (
	"bytes"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Lanes in long chains hold pieces of 1 MiB: maxLong of them do at a time, however many lanes there
// are. One that waits for its turn keeps no fence waiting.
func TestLongChainsAreFew(t *testing.T) {
	a := host.New(testCluster, keyring.NewRing(testKey.Public()), 1, 77, host.Limits{})
	m, err := host.NewMemory("test", proto.MinRegionBytes)
	require.NoError(t, err)
	defer m.Close()
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := NewServer(a, nil)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	defer func() {
		s.Close()
		require.NoError(t, <-done)
		require.NoError(t, a.Close(t.Context()))
	}()
	for range maxLong {
		s.busy <- struct{}{} // as many lanes as may
	}
	to := dial(t, l.Addr().String(), 1, 0)
	data := make([]byte, rdma.MaxVerbBytes)
	write := func(to *rdma.Target) error {
		return do(to, clock.In(10*time.Minute), func(c *rdma.Chain) { c.Write(1<<20, data) }).Err
	}
	short := func(to *rdma.Target) error {
		return do(to, clock.In(10*time.Minute), func(c *rdma.Chain) { c.Write(1<<20, data[:64]) }).Err
	}
	require.NoError(t, short(to), "short chains need no turn")
	ended := make(chan error, 1)
	go func() { ended <- write(to) }()
	stacks := make([]byte, 1<<20)
	require.Eventually(t, func() bool { return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("(*handler).long")) }, time.Minute, time.Millisecond, "it waits")
	require.NoError(t, a.Fence(t.Context(), 1), "a lane that waits can be fenced")
	require.Error(t, <-ended)

	other := dial(t, l.Addr().String(), 2, 0)
	go func() { ended <- write(other) }()
	<-s.busy
	require.NoError(t, <-ended, "when another has ended")
}
