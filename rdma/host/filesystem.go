package host

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// FileSystem is what region files can rely on where they lie.
type FileSystem struct {
	// Name of its type, such as ext4.
	Name string
	// Volatile says why flushed data may be lost with the power; nil: it survives.
	Volatile error
	// Unpinnable says why no device may write to its pages; nil: it may.
	Unpinnable error
}

// kind is what is known of a type of file system.
type kind struct {
	name string
	// flushes: msync and fsync return when the data is on the medium, whose write cache
	// was flushed, and the file finds it after a loss of power.
	flushes bool
	// memory: the pages are all there is. Elsewhere a device writes to pages of the page
	// cache without the kernel's knowledge, and a flush leaves them out.
	memory bool
}

// Types of file systems by the number that statfs says. Those with neither property are
// here for their names alone: overlay and fuse flush as what is below them does, or not
// (mount option volatile, a program that ignores FSYNC); 9p, nfs, cifs and ceph as a server
// does that cannot be asked; on zfs the property sync=disabled cannot be seen.
var kinds = map[uint32]kind{
	unix.TMPFS_MAGIC:           {name: "tmpfs", memory: true},
	unix.RAMFS_MAGIC:           {name: "ramfs", memory: true},
	unix.HUGETLBFS_MAGIC:       {name: "hugetlbfs", memory: true},
	unix.EXT4_SUPER_MAGIC:      {name: "ext4", flushes: true}, // ext2 and ext3 have the same number
	unix.XFS_SUPER_MAGIC:       {name: "xfs", flushes: true},
	unix.BTRFS_SUPER_MAGIC:     {name: "btrfs", flushes: true},
	unix.F2FS_SUPER_MAGIC:      {name: "f2fs", flushes: true},
	unix.BCACHEFS_SUPER_MAGIC:  {name: "bcachefs", flushes: true},
	0x2fc12fc1:                 {name: "zfs"},
	unix.OVERLAYFS_SUPER_MAGIC: {name: "overlay"},
	unix.FUSE_SUPER_MAGIC:      {name: "fuse"},
	unix.V9FS_MAGIC:            {name: "9p"},
	unix.NFS_SUPER_MAGIC:       {name: "nfs"},
	unix.CIFS_SUPER_MAGIC:      {name: "cifs"},
	unix.SMB2_SUPER_MAGIC:      {name: "smb"},
	unix.CEPH_SUPER_MAGIC:      {name: "ceph"},
	unix.MSDOS_SUPER_MAGIC:     {name: "vfat"},
	unix.EXFAT_SUPER_MAGIC:     {name: "exfat"},
	unix.ECRYPTFS_SUPER_MAGIC:  {name: "ecryptfs"},
}

// Flushing lists the types of file systems on which regions survive a loss of power.
func Flushing() (names []string) {
	for _, k := range kinds {
		if k.flushes {
			names = append(names, k.name)
		}
	}
	slices.Sort(names)
	return names
}

// FileSystemOf describes the file system of a file or folder.
func FileSystemOf(path string) (FileSystem, error) {
	f, err := os.Open(path)
	if err != nil {
		return FileSystem{}, err
	}
	defer f.Close()
	return fileSystem(f)
}

// PersistenceOf says what memory of new files in a folder would have. It leaves nothing there.
func PersistenceOf(dir string) (pmem.Persistence, error) {
	none := pmem.Persistence{Kind: pmem.KindVolatile, Flush: pmem.NoWay.String()}
	fs, err := FileSystemOf(dir)
	if err != nil || fs.Volatile != nil {
		return none, err
	}
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	f := os.NewFile(uintptr(fd), dir)
	if err != nil { // a file system without files that have no name
		if f, err = os.CreateTemp(dir, ".probe-*"); err != nil {
			return none, err
		}
		defer os.Remove(f.Name())
	}
	defer f.Close()
	bytes := uint64(os.Getpagesize())
	if err := f.Truncate(int64(bytes)); err != nil {
		return none, fmt.Errorf("%s: %w", dir, err)
	}
	m, err := pmem.Map(f, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, true)
	if err != nil {
		return none, fmt.Errorf("%s: %w", dir, err)
	}
	return m.Persistence(), unix.Munmap(m.Mem)
}

// fileSystem describes the file system that an open file is in.
func fileSystem(f *os.File) (FileSystem, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return FileSystem{}, fmt.Errorf("file system of %s: %w", f.Name(), err)
	}
	return describe(uint32(fs.Type), func() []string { return mountOptions(f) }), nil
}

// describe applies the list. options are those of the mount, asked for where they matter.
func describe(number uint32, options func() []string) FileSystem {
	k, known := kinds[number]
	if !known {
		k.name = fmt.Sprintf("file system %#x", number)
	}
	fs := FileSystem{Name: k.name}
	switch {
	case k.memory:
		fs.Volatile = fmt.Errorf("%s is memory", k.name)
	case !k.flushes:
		fs.Volatile = fmt.Errorf("%s is not known to keep what was flushed when the power fails: regions survive on %s", k.name, strings.Join(Flushing(), ", "))
	default:
		for _, o := range options() {
			if o == "nobarrier" || o == "barrier=0" || o == "fsync_mode=nobarrier" {
				fs.Volatile = fmt.Errorf("%s is mounted with %s: a flush does not empty the write cache of the disk", k.name, o)
			}
		}
	}
	if !k.memory {
		fs.Unpinnable = fmt.Errorf("an adapter would write to the pages of %s without the kernel's knowledge, and a flush would leave its writes out: "+
			"adapters need regions in memory, on tmpfs or on huge pages", k.name)
	}
	return fs
}

// mountOptions are the options of the mount that a file was opened on; none if the kernel
// does not tell which that is (before Linux 5.8).
func mountOptions(f *os.File) []string {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil || st.Mask&unix.STATX_MNT_ID == 0 {
		return nil
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		// 36 35 98:0 /root /where rw,noatime shared:1 - ext4 /dev/vda rw,barrier=0
		mount, super, _ := strings.Cut(lines.Text(), " - ")
		fields, rest := strings.Fields(mount), strings.Fields(super)
		if len(fields) > 5 && len(rest) > 2 && fields[0] == strconv.FormatUint(st.Mnt_id, 10) {
			return append(strings.Split(fields[5], ","), strings.Split(rest[2], ",")...)
		}
	}
	return nil
}
