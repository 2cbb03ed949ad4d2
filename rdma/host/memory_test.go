package host

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// blocks is how much storage a file has.
func blocks(t *testing.T, f *os.File) uint64 {
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	return uint64(st.Blocks) * 512
}

// All of a region's memory is there from the beginning, also of a file that is opened
// with holes in it, such as a copy may have.
func TestMemoryIsReserved(t *testing.T) {
	const size = 64 << 20
	m := memory(t, size)
	require.Len(t, m.Bytes(), size)
	require.EqualValues(t, size, blocks(t, m.file))
	require.False(t, m.Persistent())
	require.ErrorIs(t, m.Persist(0, 8), rdma.ErrNotPersistent)

	path := filepath.Join(t.TempDir(), "region")
	for _, create := range []bool{true, false} {
		f, err := OpenMemory(path, size, create)
		require.NoError(t, err)
		require.GreaterOrEqual(t, blocks(t, f.file), uint64(size))
		require.NoError(t, f.Close())
		require.Error(t, f.Close())
		require.NoError(t, os.Truncate(path, 4096))
		require.NoError(t, os.Truncate(path, size))
	}
}

// mounted is a folder on a small file system of a kind.
func mounted(t *testing.T, kind string, mib int) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	dir := t.TempDir()
	args := []string{"-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", mib), "none", dir}
	if strings.HasPrefix(kind, "ext") {
		image := filepath.Join(t.TempDir(), "image")
		require.NoError(t, os.WriteFile(image, nil, 0o600))
		require.NoError(t, os.Truncate(image, int64(mib)<<20))
		if out, err := exec.Command("mkfs."+kind, "-q", image).CombinedOutput(); err != nil {
			t.Skipf("no %s can be made here: %v %s", kind, err, out)
		}
		args = []string{"-o", "loop", image, dir}
	}
	if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
		t.Skipf("no %s can be mounted here: %v %s", kind, err, out)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// A file system that has no room says so when memory is made. What was made before can be
// read, written and opened again when the file system is full. ext2 cannot reserve by a
// call of its own.
func TestReservedMemoryOutlastsAFullFileSystem(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4", "ext2"} {
		t.Run(kind, func(t *testing.T) {
			const size = 32 << 20
			dir := mounted(t, kind, 56)
			m, err := OpenMemory(filepath.Join(dir, "first"), size, true)
			require.NoError(t, err)
			t.Cleanup(func() { _ = m.Close() }) // closed already unless the test failed
			_, err = OpenMemory(filepath.Join(dir, "second"), size, true)
			require.ErrorIs(t, err, ErrNoSpace)
			require.ErrorContains(t, err, filepath.Join(dir, "second"))
			// Nor is a file opened whose holes cannot be filled.
			holes := filepath.Join(dir, "holes")
			require.NoError(t, os.WriteFile(holes, nil, 0o600))
			require.NoError(t, os.Truncate(holes, size))
			_, err = OpenMemory(holes, size, false)
			require.ErrorIs(t, err, ErrNoSpace)
			require.ErrorContains(t, err, holes)
			f, err := os.Create(filepath.Join(dir, "third"))
			require.NoError(t, err)
			defer f.Close()
			for err == nil {
				_, err = f.Write(make([]byte, 1<<20))
			}
			require.ErrorIs(t, err, unix.ENOSPC)
			for off := 0; off < size; off += 4096 {
				require.Zero(t, m.Bytes()[off])
				m.Bytes()[off] = 1
			}
			require.NoError(t, m.Zero(0))
			for off := 4096; off < size; off += 4096 { // a region's header stays zero
				m.Bytes()[off] = 2
			}
			// A node starts again however full the file system is by then.
			require.NoError(t, m.Close())
			again, err := OpenMemory(filepath.Join(dir, "first"), size, false)
			require.NoError(t, err)
			t.Cleanup(func() { again.Close() })
			for off := 0; off < size; off += 4096 {
				require.EqualValues(t, min(off, 2), again.Bytes()[off])
			}
		})
	}
}

// What is left of memory is what the narrowest of a process's control groups leaves.
func TestMemoryOfControlGroups(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) string {
		p := filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o700))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o600))
		return p
	}
	groups := write("groups", "3:cpu:/x\n0::/pod/one\n")
	require.Equal(t, uint64(math.MaxUint64), groupMemory(root, groups))
	write("sys/fs/cgroup/pod/one/memory.max", "max\n")
	write("sys/fs/cgroup/pod/memory.max", "1000\n")
	write("sys/fs/cgroup/pod/memory.current", "700\n")
	require.EqualValues(t, 300, groupMemory(root, groups))
	write("sys/fs/cgroup/pod/memory.stat", "anon 1\nactive_file 100\ninactive_file 50\n")
	require.EqualValues(t, 450, groupMemory(root, groups))
	groups = write("groups", "4:memory:/one\n")
	write("sys/fs/cgroup/memory/one/memory.limit_in_bytes", "500")
	write("sys/fs/cgroup/memory/one/memory.usage_in_bytes", "600")
	require.Zero(t, groupMemory(root, groups))
	require.Less(t, AvailableMemory(), uint64(math.MaxUint64))
}

func TestMemoryInAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "region")
	_, err := OpenMemory(path, proto.MinRegionBytes, false)
	require.ErrorContains(t, err, path)
	m, err := OpenMemory(path, proto.MinRegionBytes, true)
	require.NoError(t, err)
	h := proto.RegionHeader{Domain: proto.DomainCPU, RegionBytes: proto.MinRegionBytes, Region: 3}
	copy(m.Bytes(), h.Encode())
	copy(m.Bytes()[1<<20:], "quarry")
	if m.Persistent() {
		require.NoError(t, m.Persist(1<<20, 6))
		require.NoError(t, m.Persist(proto.MinRegionBytes-1, 1))
		require.Error(t, m.Persist(proto.MinRegionBytes-1, 2))
		require.Error(t, m.Persist(^uint64(0), 2))
	}
	require.NoError(t, m.Close())
	m, err = OpenMemory(path, proto.MinRegionBytes, false)
	require.NoError(t, err)
	require.Equal(t, "quarry", string(m.Bytes()[1<<20:][:6]))
	require.NoError(t, m.Close())
}

// Truncated files, garbage and other people's files are refused, and left as they are.
func TestBadFilesAreRefused(t *testing.T) {
	const size = proto.MinRegionBytes
	header := func(change func(*proto.RegionHeader)) []byte {
		h := proto.RegionHeader{Domain: proto.DomainCPU, RegionBytes: size, Region: 3}
		change(&h)
		return append(h.Encode(), make([]byte, size-proto.RegionHeaderBytes)...)
	}
	good := header(func(*proto.RegionHeader) {})
	flipped := bytes.Clone(good)
	flipped[50] ^= 1
	earlier := bytes.Clone(good)
	earlier[8] = 1
	for name, c := range map[string]struct {
		content []byte
		says    string
	}{
		"truncated":    {good[:size-4096], "truncated"},
		"one byte":     {good[:1], "truncated"},
		"longer":       {append(bytes.Clone(good), 0), "has 16777217 bytes"},
		"garbage":      {bytes.Repeat([]byte("garbage "), size/8), "wrong magic"},
		"flipped":      {flipped, "checksum is wrong"},
		"other layout": {earlier, "quarry kv dump"},
		"other size":   {header(func(h *proto.RegionHeader) { h.RegionBytes = 2 * size }), "its header says"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "region")
			require.NoError(t, os.WriteFile(path, c.content, 0o600))
			for _, create := range []bool{false, true} {
				_, err := OpenMemory(path, size, create)
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, path)
				require.NotContains(t, err.Error(), "\n")
			}
			now, err := os.ReadFile(path)
			require.NoError(t, err)
			require.True(t, bytes.Equal(c.content, now))
		})
	}
	dir := t.TempDir()
	_, err := OpenMemory(dir, size, true)
	require.Error(t, err)
	empty := filepath.Join(dir, "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	_, err = OpenMemory(empty, size, false)
	require.Error(t, err, "a region that must exist is not made")
	for _, bytes := range []uint64{0, 1, 4095, 1 << 50} {
		_, err := NewMemory("test", bytes)
		require.Error(t, err)
	}
	device := filepath.Join(dir, "null")
	require.NoError(t, os.Symlink("/dev/null", device))
	_, err = OpenMemory(device, size, true)
	require.ErrorContains(t, err, "not a regular file")
}

// The owner may close a memory while it is served: it is unmapped when the last
// lane is out.
func TestMemoryOutlivesItsOwner(t *testing.T) {
	a := New(testCluster, testKeys, 1, 1, Limits{})
	m, err := NewMemory("outlives", 1<<20)
	require.NoError(t, err)
	mapped := func() bool {
		b, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return strings.Contains(string(b), "quarry-outlives")
	}
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	l := admit(t, a, 1, 0)
	w, _, err := l.Open(1, 1, 0)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	_, err = l.Run(0, w.Key, []rdma.Verb{{Op: rdma.FetchAdd, New: 1}})
	require.NoError(t, err)
	require.True(t, mapped())
	require.NoError(t, a.CloseRegion(t.Context(), 1, 1))
	require.False(t, mapped())
	_, err = l.Run(0, w.Key, []rdma.Verb{{Op: rdma.FetchAdd, New: 1}})
	require.ErrorIs(t, err, rdma.ErrKey)
	require.Error(t, a.OpenRegion(t.Context(), 1, 2, m), "closed memory")
}

func TestHugeMemory(t *testing.T) {
	const page = 2 << 20
	_, err := NewHugeMemory("odd", 3<<20, page)
	require.ErrorContains(t, err, "multiple")
	needHugePages(t, 4)
	m, err := NewHugeMemory("huge", 4*page, page)
	require.NoError(t, err)
	m.Bytes()[3*page] = 7
	require.EqualValues(t, 4*page, m.TouchedBytes())
	_, err = NewHugeMemory("more", 1<<40, page)
	require.ErrorContains(t, err, "vm.nr_hugepages")
	require.NoError(t, m.Close())
}

// Memory that has been given up hands out no descriptor: the number of its file may
// be another one's by then.
func TestClosedMemoryHasNoDescriptor(t *testing.T) {
	m, err := NewMemory("gone", proto.MinRegionBytes)
	require.NoError(t, err)
	f, err := m.Descriptor(true)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, m.Close())
	for _, write := range []bool{true, false} {
		_, err = m.Descriptor(write)
		require.ErrorContains(t, err, "is closed")
	}
}
