package storagenode_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
)

// A node on a device serves tcp and no shm, and finds its regions, its cluster and its fences again. The device is
// a file here.
func TestANodeOnADevice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dax0.0")
	nodeOnADevice(t, path, func(b *boss, format bool) storagenode.Config {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		require.NoError(t, f.Truncate(128<<20))
		cfg := b.config(path)
		cfg.Format = format
		cfg.OnDevice(&pmem.Device{File: f, Path: path, Bytes: 128 << 20, Align: 2 << 20})
		return cfg
	}, func(st storagenode.Stats) {
		if fs, err := host.FileSystemOf(filepath.Dir(path)); err == nil && fs.Volatile == nil {
			require.Equal(t, "msync", st.Persistence.Flush, "of the file in place of a device")
		}
	})
}

// The same on a real one.
func TestANodeOnNVDIMM(t *testing.T) {
	path := os.Getenv("PMEM_DEVDAX")
	if path == "" {
		t.Skip("no NVDIMM: make test and make test-pmem run this in a virtual machine that has two")
	}
	nodeOnADevice(t, path, func(b *boss, format bool) storagenode.Config {
		cfg := b.config(path)
		cfg.Format, cfg.RDMA.Fabric = format, storagenode.FabricTCP
		return cfg
	}, func(st storagenode.Stats) {
		require.Equal(t, pmem.KindDevDAX, st.Persistence.Kind)
		require.Equal(t, pmem.DomainController, st.Persistence.Domain)
		t.Logf("the node says %+v", st.Persistence)
	})
}

func nodeOnADevice(t *testing.T, path string, configOf func(*boss, bool) storagenode.Config, check func(storagenode.Stats)) {
	b := newBoss(t)
	config := func(format bool) storagenode.Config { return configOf(b, format) }
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := storagenode.Start(ctx, config(false))
	require.ErrorContains(t, err, path+": holds no directory of a storage node: --format makes one")

	n := b.start(config(true))
	b.hostAndOpen(n, 1, 1)
	st := n.Stats()
	require.Empty(t, st.Socket, "no shm")
	require.Equal(t, "devdax", st.FileSystem.Kind)
	check(st)
	l, err := b.dial(tcp.Dialer{}, st.TCP, 1, 0, 1, 1)
	require.NoError(t, err)
	require.NoError(t, l.write(dataOff, 7))
	require.Zero(t, call(t, b.agent(n).Fence, &quarrypb.FenceRequest{Serials: []uint64{5}, ControllerTerm: 1}))
	require.NoError(t, n.Close())

	n = b.start(config(true)) // the flag may stay in a unit file
	list := b.registrations()
	require.Len(t, list[len(list)-1].Found, 1)
	require.Zero(t, call(t, b.agent(n).OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 2, ControllerTerm: 1}))
	l, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 2, 0, 1, 2)
	require.NoError(t, err)
	got, err := l.read(dataOff, 64)
	require.NoError(t, err)
	require.EqualValues(t, 7, got[0])

	cfg := b.config(t.TempDir())
	cfg.Format = true
	_, err = storagenode.Start(ctx, cfg)
	require.ErrorContains(t, err, "--format is for a device")
	_, err = storagenode.Start(ctx, b.config("/dev/null"))
	require.ErrorContains(t, err, "/dev/null is not device DAX")
}
