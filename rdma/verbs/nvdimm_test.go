//go:build cgo && verbs && yardstick

package verbs

import (
	"net/netip"
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

// kernelFlushes says whether device and kernel have a persistent FLUSH: Soft-RoCE from Linux 6.2 on.
func kernelFlushes(t *testing.T) bool {
	d, err := openDevice(Config{}, netip.Addr{})
	require.NoError(t, err)
	defer d.close()
	if !d.caps.Persistent {
		t.Log("this kernel's device has no persistent FLUSH (Soft-RoCE has it from Linux 6.2 on): native is refused, and not tried")
	}
	return d.caps.Persistent
}

// What an adapter registers: the table of docs/RDMA.md.
func TestRegistrationsOnNVDIMM(t *testing.T) {
	fsdax, devdax := needNVDIMM(t)
	flushes := kernelFlushes(t)
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
		require.Equal(t, c.persistent == nil && flushes, persistent == nil, c.name)
	}
}

// Each method makes what an adapter has written to a device durable, as the node tells it: native by the adapter's own FLUSH of
// each range, appliance by one READ for all that nothing waits for, agent by the node.
func TestPersistentFlushOnNVDIMM(t *testing.T) {
	_, devdax := needNVDIMM(t)
	m := on(t, devdax, rdmatest.RegionBytes)
	require.NoError(t, m.Zero(0))
	require.Equal(t, pmem.KindDevDAX, m.Persistence().Kind)
	notNative := NotNative(Config{Windows: WindowsOff}, m.Bytes())
	t.Logf("native: %v", notNative)
	if os.Getenv("RXE_NATIVE_FLUSH") != "" {
		require.NoError(t, notNative, "this machine was made for it")
	}
	if kernelFlushes(t) {
		require.ErrorIs(t, NotNative(Config{}, m.Bytes()), errWindowsFlush)
	} else {
		require.ErrorContains(t, notNative, "device capabilities")
	}
	memory, err := host.NewMemory("volatile", rdmatest.RegionBytes)
	require.NoError(t, err)
	defer memory.Close()
	require.Error(t, NotNative(Config{Windows: WindowsOff}, memory.Bytes()), "memory is not persistent")
	for _, c := range []struct {
		method rdma.FlushMethod
		stats  Stats // of the chain below
	}{
		{rdma.Native, Stats{Flushed: 4}},
		{rdma.ReadAfterWrite, Stats{Pushed: 2}},
		{rdma.Message, Stats{Asked: 4}},
	} {
		t.Run(c.method.String(), func(t *testing.T) {
			if c.method == rdma.Native && notNative != nil {
				t.Skip(notNative)
			}
			n := startNodeOf(t, testCluster, Config{Windows: WindowsOff, Flush: c.method})
			require.NoError(t, n.openMemory(1, 1, m))
			d := newDialer(t)
			_, to := open(t, d, n.addr, ticket(1, 0, rdma.ReadWrite), 0)
			require.Equal(t, c.method, to.Window.Flush)
			require.NoError(t, m.Zero(0))
			src, old := []byte("written by an adapter, and made durable by it   "), uint64(0)
			for round := range uint64(20) {
				got := chain(to, guard, func(ch *rdma.Chain) {
					for i := range uint64(3) { // of which the last makes all durable
						ch.Write(4096*(i+1), src)
						ch.Flush(rdma.Persistent, 4096*(i+1), uint64(len(src)))
					}
					ch.CAS(64, round, round+1)
					ch.Fenced()
					ch.Flush(rdma.Persistent, 64, 8)
					ch.Fenced()
					ch.FetchAdd(72, 1)
				})
				require.NoError(t, got.Err)
				require.Equal(t, 9, got.Done)
				require.Equal(t, old, got.Verbs[6].Old)
				require.Equal(t, round, got.Verbs[8].Old)
				old = round + 1
				for i := range 3 {
					require.Equal(t, src, m.Bytes()[4096*(i+1):4096*(i+1)+len(src)])
				}
			}
			got := d.Stats()
			require.Equal(t, Stats{Flushed: 20 * c.stats.Flushed, Pushed: 20 * c.stats.Pushed, Asked: 20 * c.stats.Asked}, Stats{Flushed: got.Flushed, Pushed: got.Pushed, Asked: got.Asked})
			// The FLUSH that another one was left to is refused: the first is carried out all the same.
			refused := chain(to, guard, func(ch *rdma.Chain) {
				ch.Write(4096, src)
				ch.Flush(rdma.Persistent, 4096, 8)
				ch.Flush(rdma.Persistent, rdmatest.RegionBytes, 8)
			})
			require.ErrorIs(t, refused.Err, rdma.ErrBounds)
			require.Equal(t, 2, refused.Done)
		})
	}
}
