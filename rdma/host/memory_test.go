package host

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMemoryIsSparse(t *testing.T) {
	m := memory(t, 2<<30)
	require.Len(t, m.Bytes(), 2<<30)
	m.Bytes()[1<<30] = 1
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(m.file.Fd()), &st))
	require.Less(t, st.Blocks*512, int64(4<<20)) // at most a huge page
	require.False(t, m.Persistent())
	require.ErrorIs(t, m.Persist(0, 8), rdma.ErrNotPersistent)

	path := filepath.Join(t.TempDir(), "region")
	f, err := OpenMemory(path, 2<<30, true)
	require.NoError(t, err)
	f.Bytes()[1<<30] = 1
	require.NoError(t, unix.Fstat(int(f.file.Fd()), &st))
	require.Less(t, st.Blocks*512, int64(4<<20))
	require.NoError(t, f.Close())
	require.Error(t, f.Close())
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
	newer := bytes.Clone(good)
	newer[8] = 2
	for name, c := range map[string]struct {
		content []byte
		says    string
	}{
		"truncated":    {good[:size-4096], "truncated"},
		"one byte":     {good[:1], "truncated"},
		"longer":       {append(bytes.Clone(good), 0), "has 16777217 bytes"},
		"garbage":      {bytes.Repeat([]byte("garbage "), size/8), "wrong magic"},
		"flipped":      {flipped, "seal is wrong"},
		"other layout": {newer, "layout version 2"},
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
	a := New(testCluster, testKey, 1, 1, Limits{})
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
	b, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if free, _ := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || free < 8 {
		t.Skip("no 8 free huge pages of 2 MiB (sysctl vm.nr_hugepages=8)")
	}
	m, err := NewHugeMemory("huge", 4*page, page)
	require.NoError(t, err)
	m.Bytes()[3*page] = 7
	require.EqualValues(t, page, m.TouchedBytes(), "one page is touched")
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
