package host

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const hugeFolder = "/sys/kernel/mm/hugepages/hugepages-2048kB/"

// hugeCount reads one of the kernel's counts of huge pages.
func hugeCount(t *testing.T, name string) int {
	b, err := os.ReadFile(hugeFolder + name)
	if err != nil {
		t.Skipf("no huge pages of 2 MiB: %v", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	return n
}

// freeHugePages counts the huge pages that no mapping has and none has reserved.
func freeHugePages(t *testing.T) int {
	return hugeCount(t, "free_hugepages") - hugeCount(t, "resv_hugepages")
}

// needHugePages sees to it that n huge pages are free during the test. It sets them aside where it
// may, and skips the test otherwise.
func needHugePages(t *testing.T, n int) {
	t.Helper()
	if freeHugePages(t) >= n {
		return
	}
	before := hugeCount(t, "nr_hugepages")
	set := func(count int) error { return os.WriteFile(hugeFolder+"nr_hugepages", []byte(strconv.Itoa(count)), 0) }
	if err := set(before + n); err != nil {
		t.Skipf("no %d free huge pages of 2 MiB (sysctl vm.nr_hugepages=%d): %v", n, n, err)
	}
	t.Cleanup(func() { require.NoError(t, set(before)) })
	if free := freeHugePages(t); free < n {
		t.Skipf("%d huge pages of 2 MiB are free, and the kernel finds no more: %d are needed", free, n)
	}
}

// allZero reads the file, not the mapping: a device's view would differ from either
// where the pages of the two are not the same.
func allZero(t *testing.T, m *Memory, from uint64) {
	t.Helper()
	b := make([]byte, len(m.mem))
	_, err := m.file.ReadAt(b, 0)
	require.NoError(t, err)
	require.True(t, bytes.Equal(make([]byte, uint64(len(b))-from), b[from:]), "the file is not zero")
	require.True(t, bytes.Equal(make([]byte, uint64(len(b))-from), m.mem[from:]), "the mapping is not zero")
}

// Zeroed memory keeps its pages: it stays reserved, and the memory of a device that has
// registered it.
func TestZeroKeepsPinnedPages(t *testing.T) {
	file := func(t *testing.T) *Memory {
		at := mount(t, "tmpfs", func(string) string { return "" })
		m, err := OpenMemory(filepath.Join(at, "region"), 4<<20, true)
		require.NoError(t, err)
		return m
	}
	for name, make := range map[string]func(t *testing.T) *Memory{
		"anonymous": func(t *testing.T) *Memory { return memory(t, 4<<20) },
		"file":      file,
	} {
		t.Run(name, func(t *testing.T) {
			m := make(t)
			for i := range m.mem {
				m.mem[i] = 7
			}
			require.NoError(t, m.Pin())
			require.NoError(t, m.Pin())
			m.Unpin()
			touched := m.TouchedBytes()
			require.GreaterOrEqual(t, touched, uint64(4<<20))
			require.NoError(t, m.Zero(8192))
			require.Equal(t, touched, m.TouchedBytes(), "a page has left the file")
			require.Equal(t, bytes.Repeat([]byte{7}, 8192), m.mem[:8192])
			allZero(t, m, 8192)
			require.Error(t, m.Zero(4<<20+4096))
		})
	}
}

// Huge pages are set aside when the memory is made, and stay so when it is zeroed:
// otherwise another region takes them, and the next touch is a SIGBUS.
func TestZeroKeepsHugePagesReserved(t *testing.T) {
	const page = 2 << 20
	needHugePages(t, 4)
	m, err := NewHugeMemory("huge", 4*page, page)
	require.NoError(t, err)
	defer m.Close()
	for i := 0; i < len(m.mem); i += 4096 {
		m.mem[i] = 1
	}
	left := freeHugePages(t)
	require.NoError(t, m.Zero(8192))
	require.Equal(t, left, freeHugePages(t), "zeroing gave huge pages away")
	require.Equal(t, byte(1), m.mem[4096])
	require.True(t, bytes.Equal(make([]byte, 4*page-8192), m.mem[8192:]))
}

// A file on hugetlbfs has reserved pages as well.
func TestZeroKeepsFileOnHugetlbfsReserved(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "hugetlbfs", 0, "pagesize=2M"); err != nil {
		t.Skipf("needs root to mount hugetlbfs: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	needHugePages(t, 2)
	m, err := OpenMemory(filepath.Join(dir, "region"), 4<<20, true)
	require.NoError(t, err)
	defer m.Close()
	m.mem[1<<20] = 1
	require.EqualValues(t, 4<<20, m.TouchedBytes())
	require.NoError(t, m.Zero(8192))
	require.EqualValues(t, 4<<20, m.TouchedBytes())
	require.Zero(t, m.mem[1<<20])
}
