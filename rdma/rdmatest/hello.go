package rdmatest

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Hello reads a node's challenge from a connection and returns the hello that answers it.
func Hello(t testing.TB, nc io.Reader, as *rdma.Credentials, lane uint32) []byte {
	if d, ok := nc.(interface{ SetReadDeadline(time.Time) error }); ok {
		require.NoError(t, d.SetReadDeadline(time.Now().Add(time.Minute)))
	}
	var b [host.ChallengeBytes]byte
	_, err := io.ReadFull(nc, b[:])
	require.NoError(t, err)
	c, err := host.DecodeChallenge(b[:])
	require.NoError(t, err)
	h, err := host.NewHello(as, lane, &c, host.Binding{})
	require.NoError(t, err)
	return h.Append(nil)
}
