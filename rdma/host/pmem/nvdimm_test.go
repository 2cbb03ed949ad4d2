package pmem

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// nvdimm is a path that the virtual machine with NVDIMMs has; see verify/rxevm.
func nvdimm(t *testing.T, variable string) string {
	path := os.Getenv(variable)
	if path == "" {
		t.Skip("no NVDIMM: make test and make test-pmem run this in a virtual machine that has two")
	}
	return path
}

// use stores, streams and flushes in memory that lines are flushed of, and reads it back.
func use(t *testing.T, m *Mapping) {
	require.Equal(t, "line", m.Flusher.Granularity())
	src := bytes.Repeat([]byte("persist!"), 1024)
	copy(m.Mem[64:], src)
	require.NoError(t, m.Flusher.Persist(m.Mem, 64, uint64(len(src))))
	require.True(t, m.Flusher.Streams())
	m.Flusher.Stream(m.Mem, 16384, src)
	require.Equal(t, src, m.Mem[64:64+len(src)])
	require.Equal(t, src, m.Mem[16384:16384+len(src)])
}

// A file of a DAX mount is mapped with MAP_SYNC, and its lines are flushed; what was flushed is in the file, without msync.
func TestFileOnNVDIMM(t *testing.T) {
	f, err := os.Create(filepath.Join(nvdimm(t, "PMEM_FSDAX"), "file"))
	require.NoError(t, err)
	defer os.Remove(f.Name())
	defer f.Close()
	_, err = f.Write(make([]byte, 1<<20))
	require.NoError(t, err)
	m, err := Map(f, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, true)
	require.NoError(t, err)
	p := m.Persistence()
	t.Logf("DAX file system: %+v, granularity %s, region %s", p, m.Flusher.Granularity(), m.Region)
	require.Equal(t, KindFSDAX, p.Kind)
	require.Equal(t, DomainController, p.Domain, "as qemu was asked for")
	use(t, &m)
	require.NoError(t, m.Unmap())
	got := make([]byte, 8)
	_, err = f.ReadAt(got, 64)
	require.NoError(t, err)
	require.Equal(t, "persist!", string(got))
	// A client whose mapping is read-only flushes too.
	m, err = Map(f, 0, 1<<20, unix.PROT_READ, true)
	require.NoError(t, err)
	require.NoError(t, m.Flusher.Persist(m.Mem, 0, 1<<20))
	require.NoError(t, m.Unmap())
}

// A device says its size and alignment, is locked, is flushed by lines, and has what the mapping before left.
func TestDeviceOnNVDIMM(t *testing.T) {
	path := nvdimm(t, "PMEM_DEVDAX")
	d, err := OpenDevice(path)
	require.NoError(t, err)
	defer d.File.Close()
	_, err = OpenDevice(path)
	require.ErrorContains(t, err, "in use by another storage node")
	last := d.Bytes - 4<<20
	m, err := d.Map(last, 4<<20)
	require.NoError(t, err)
	t.Logf("device DAX: %d bytes aligned to %d, %+v, granularity %s, region %s", d.Bytes, d.Align, m.Persistence(), m.Flusher.Granularity(), m.Region)
	require.Equal(t, KindDevDAX, m.Persistence().Kind)
	require.Equal(t, DomainController, m.Persistence().Domain)
	use(t, &m)
	require.NoError(t, m.Unmap())
	m, err = d.Map(last, 4<<20)
	require.NoError(t, err)
	require.Equal(t, "persist!", string(m.Mem[64:72]))
	require.NoError(t, m.Unmap())
}

// The block device of a namespace is refused, with the way to make a device of it.
func TestBlockDeviceOnNVDIMM(t *testing.T) {
	nvdimm(t, "PMEM_FSDAX")
	_, err := OpenDevice("/dev/pmem0")
	require.ErrorContains(t, err, "ndctl create-namespace --force --reconfig=NAMESPACE --mode=devdax")
}
