package shm_test

import (
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/stretchr/testify/require"
)

var incarnations atomic.Uint64 // every node started is another incarnation

// serve starts a shm server in a directory of its own.
func serve(t testing.TB, a *host.Access) (addr string, stop func()) {
	addr = filepath.Join(t.TempDir(), "s")
	l, err := shm.Listen(addr)
	require.NoError(t, err)
	s := shm.NewServer(a, nil)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	return addr, func() {
		require.NoError(t, s.Close())
		require.NoError(t, <-done)
	}
}

func start(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
	return rdmatest.StartHost(t, c, incarnations.Add(1), func(a *host.Access) (string, func()) { return serve(t, a) }, nil)
}

func TestContract(t *testing.T) {
	rdmatest.Run(t, rdmatest.Provider{Name: "shm", Dialer: shm.NewDialer(), Start: start})
}

func TestContractInproc(t *testing.T) {
	d := shm.NewInproc()
	rdmatest.Run(t, rdmatest.Provider{
		Name: "inproc", Dialer: d,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
			incarnation := incarnations.Add(1)
			return rdmatest.StartHost(t, c, incarnation, func(a *host.Access) (string, func()) {
				addr := t.Name() + string(rune('a'+incarnation))
				d.Add(addr, a)
				return addr, func() { d.Remove(addr) }
			}, nil)
		},
	})
}

// The same on regions that are ordinary files, where a persistent FLUSH is msync.
func TestContractFile(t *testing.T) {
	dir := t.TempDir()
	var n atomic.Uint64
	path := func() string { return filepath.Join(dir, strconv.FormatUint(n.Add(1), 10)) }
	probe, err := host.OpenMemory(path(), rdmatest.RegionBytes, true)
	require.NoError(t, err)
	persistent := probe.Persistent() // not where temporary files live in memory
	require.NoError(t, probe.Close())
	rdmatest.Run(t, rdmatest.Provider{
		Name: "shm", Dialer: shm.NewDialer(), Persistent: persistent,
		Start: func(t testing.TB, c rdmatest.Cluster) rdmatest.Node {
			return rdmatest.StartHost(t, c, incarnations.Add(1), func(a *host.Access) (string, func()) { return serve(t, a) },
				func(uint32) (*host.Memory, error) {
					p := path()
					t.Cleanup(func() { os.Remove(p) }) // all files of the contract together do not fit a small NVDIMM
					return host.OpenMemory(p, rdmatest.RegionBytes, true)
				})
		},
	})
}
