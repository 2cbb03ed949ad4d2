//go:build cgo && verbs && yardstick

package verbs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

func needNVDIMM(t *testing.T) (fsdax, devdax string) {
	needDevice(t)
	fsdax, devdax = os.Getenv("PMEM_FSDAX"), os.Getenv("PMEM_DEVDAX")
	if devdax == "" {
		t.Skip("no NVDIMM: make test and make test-pmem run this in a virtual machine that has two")
	}
	return fsdax, devdax
}

// on is memory of a device from the middle on: its directory is another test's.
func on(t *testing.T, path string, bytes uint64) *host.Memory {
	dev, err := pmem.OpenDevice(path)
	require.NoError(t, err)
	defer dev.File.Close() // the memory has a descriptor of its own
	m, err := host.OpenDeviceMemory(dev, "test", (dev.Bytes/2)&^(2<<20-1), bytes, func([]byte) (uint64, error) { return bytes, nil })
	require.NoError(t, err)
	return m
}

// What an adapter registers: the table of docs/RDMA.md.
func TestRegistrationsOnNVDIMM(t *testing.T) {
	fsdax, devdax := needNVDIMM(t)
	const size = 16 << 20
	file, err := host.OpenMemory(filepath.Join(fsdax, "registered"), size, true)
	require.NoError(t, err)
	defer os.Remove(file.Name())
	defer file.Close()
	device := on(t, devdax, size)
	defer device.Close()
	memory, err := host.NewMemory("registered", size)
	require.NoError(t, err)
	defer memory.Close()
	for _, c := range []struct {
		name              string
		m                 *host.Memory
		plain, persistent error // of the kernel; nil: it registers
	}{
		{"DAX file system", file, unix.EOPNOTSUPP, unix.EOPNOTSUPP},
		{"device DAX", device, nil, nil},
		{"memory", memory, nil, unix.EINVAL},
	} {
		plain := registers(Config{}, c.m.Bytes(), 0)
		global := registers(Config{}, c.m.Bytes(), flushGlobal)
		persistent := registers(Config{}, c.m.Bytes(), flushPersistent)
		t.Logf("%s: plain %v; FLUSH global %v; FLUSH persistent %v", c.name, plain, global, persistent)
		require.Equal(t, c.plain == nil, plain == nil, c.name)
		require.Equal(t, c.plain == nil, c.m.Pin() == nil, "%s: the node says what the kernel does", c.name)
		require.Equal(t, c.persistent == nil, persistent == nil, c.name)
	}
}

// A durable WRITE over verbs, to a device: the adapter writes, the node flushes lines when it is asked.
func TestPersistentFlushOnNVDIMM(t *testing.T) {
	_, devdax := needNVDIMM(t)
	m := on(t, devdax, rdmatest.RegionBytes)
	require.NoError(t, m.Zero(0))
	require.Equal(t, pmem.KindDevDAX, m.Persistence().Kind)
	n := startNode(t, testCluster)
	n.memories[1] = m
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	_, to := open(t, newDialer(t), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
	src := []byte("written by an adapter, flushed by a processor   ")
	require.NoError(t, chain(to, guard, func(ch *rdma.Chain) {
		ch.Write(4096, src)
		ch.Flush(rdma.Persistent, 4096, uint64(len(src)))
	}).Err)
	require.Equal(t, src, m.Bytes()[4096:4096+len(src)])
}
