package host

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

// Only file systems of the list count as persistent, and only memory may be pinned.
func TestFileSystems(t *testing.T) {
	plain := func() ([]string, error) {
		return []string{"rw", "relatime", "checkpoint=enable", "journal_flush_disabled=0"}, nil
	}
	for number, want := range map[uint32]struct {
		name               string
		persistent, pinned bool
	}{
		unix.EXT4_SUPER_MAGIC:      {"ext4", true, false},
		unix.XFS_SUPER_MAGIC:       {"xfs", true, false},
		unix.BTRFS_SUPER_MAGIC:     {"btrfs", true, false},
		unix.TMPFS_MAGIC:           {"tmpfs", false, true},
		unix.HUGETLBFS_MAGIC:       {"hugetlbfs", false, true},
		unix.OVERLAYFS_SUPER_MAGIC: {"overlay", false, false},
		unix.V9FS_MAGIC:            {"9p", false, false},
		unix.NFS_SUPER_MAGIC:       {"nfs", false, false},
		unix.FUSE_SUPER_MAGIC:      {"fuse", false, false},
		unix.CIFS_SUPER_MAGIC:      {"cifs", false, false},
		0xabcdef:                   {"file system 0xabcdef", false, false},
	} {
		got := describe(number, plain)
		require.Equal(t, want.name, got.Name)
		require.Equal(t, want.persistent, got.Volatile == nil, want.name)
		require.Equal(t, want.pinned, got.Unpinnable == nil, want.name)
		if got.Volatile != nil {
			require.ErrorContains(t, got.Volatile, want.name)
		}
	}
	for _, option := range []string{"nobarrier", "barrier=0", "fsync_mode=nobarrier", "checkpoint=disable", "checkpoint=disable:10%", "journal_flush_disabled", "journal_flush_disabled=1"} {
		got := describe(unix.EXT4_SUPER_MAGIC, func() ([]string, error) { return []string{"rw", option}, nil })
		require.ErrorContains(t, got.Volatile, option)
	}
	require.NotContains(t, Flushing(), "overlay")
}

// A mount whose options cannot be read counts as one that may lose what was flushed.
func TestHazard221_UnreadableMounts(t *testing.T) {
	_, unnamed := mountOptions("/proc/self", 1<<20)
	require.ErrorIs(t, unnamed, os.ErrNotExist)
	proc := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(proc, "fdinfo"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(proc, "fdinfo", "7"), []byte("pos:\t0\nmnt_id:\t36\n"), 0o600))
	_, unlisted := mountOptions(proc, 7)
	require.ErrorIs(t, unlisted, os.ErrNotExist)
	mounts := "35 1 98:0 / / rw - ext4 /dev/vdb rw\n"
	require.NoError(t, os.WriteFile(filepath.Join(proc, "mountinfo"), []byte(mounts), 0o600))
	_, other := mountOptions(proc, 7)
	require.ErrorContains(t, other, `does not name its mount "36"`)
	for _, err := range []error{unnamed, unlisted, other} {
		got := describe(unix.EXT4_SUPER_MAGIC, func() ([]string, error) { return nil, err })
		require.ErrorIs(t, got.Volatile, err)
	}
	mounts += "36 35 98:0 /root /where rw,noatime shared:1 - ext4 /dev/vda rw,barrier=0\n"
	require.NoError(t, os.WriteFile(filepath.Join(proc, "mountinfo"), []byte(mounts), 0o600))
	options, err := mountOptions(proc, 7)
	require.NoError(t, err)
	require.Equal(t, []string{"rw", "noatime", "rw", "barrier=0"}, options)
}

// mount mounts a file system on a new folder, or skips.
func mount(t *testing.T, kind string, options func(dir string) string) string {
	dir := t.TempDir()
	for _, d := range []string{"lower", "upper", "work", "at"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, d), 0o700))
	}
	at := filepath.Join(dir, "at")
	if err := unix.Mount(kind, at, kind, 0, options(dir)); err != nil {
		t.Skipf("needs root to mount %s: %v", kind, err)
	}
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	return at
}

// The layer of a container keeps nothing that it was not asked about: durable regions do
// not count as durable there, and adapters may not write there.
func TestOverlayIsNotPersistent(t *testing.T) {
	below := mount(t, "tmpfs", func(string) string { return "" }) // overlay on overlay is refused by the kernel
	for _, d := range []string{"lower", "upper", "work"} {
		require.NoError(t, os.Mkdir(filepath.Join(below, d), 0o700))
	}
	at := mount(t, "overlay", func(string) string {
		return "lowerdir=" + below + "/lower,upperdir=" + below + "/upper,workdir=" + below + "/work"
	})
	fs, err := FileSystemOf(at)
	require.NoError(t, err)
	require.ErrorContains(t, fs.Volatile, "overlay is not known to keep what was flushed when the power fails")
	m, err := OpenMemory(filepath.Join(at, "region"), proto.MinRegionBytes, true)
	require.NoError(t, err)
	defer m.Close()
	require.False(t, m.Persistent())
	require.ErrorIs(t, m.Persist(0, 8), rdma.ErrNotPersistent)
	require.ErrorContains(t, m.Pin(), "overlay")
}

// A device is let into memory alone.
func TestPinRefusesFilesOfADisk(t *testing.T) {
	dir := t.TempDir()
	fs, err := FileSystemOf(dir)
	require.NoError(t, err)
	m, err := OpenMemory(filepath.Join(dir, "region"), proto.MinRegionBytes, true)
	require.NoError(t, err)
	defer m.Close()
	require.Equal(t, fs.Volatile == nil, m.Persistent())
	require.Equal(t, fs.Unpinnable, m.Pin())
	anonymous := memory(t, proto.MinRegionBytes)
	require.NoError(t, anonymous.Pin())
	anonymous.Unpin()
	if fs.Name == "ext4" {
		options, err := mountOptions("/proc/self", m.file.Fd())
		require.NoError(t, err)
		require.NotEmpty(t, options, "the kernel tells how ext4 is mounted")
	}
}
