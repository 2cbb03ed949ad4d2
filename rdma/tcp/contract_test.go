package tcp_test

import (
	"net"
	"sync/atomic"
	"testing"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var incarnations atomic.Uint64 // every node started is another incarnation

func serve(t testing.TB, a *host.Access, how *tcp.TLS) (addr string, stop func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := tcp.NewServer(a, nil)
	s.TLS = how
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	return l.Addr().String(), func() {
		s.Close()
		require.NoError(t, <-done)
	}
}

// starting is how nodes start that encrypt as given.
func starting(how *tcp.TLS) func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
	return func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
		return rdmatest.StartHost(t, c, incarnations.Add(1), func(a *host.Access) (string, func()) { return serve(t, a, how) }, nil)
	}
}

func TestContract(t *testing.T) {
	rdmatest.Run(t, rdmatest.Provider{Name: "tcp", Dialer: tcp.Dialer{}, Start: starting(nil)})
}
