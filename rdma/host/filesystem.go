package host

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
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
	return describe(uint32(fs.Type), func() ([]string, error) { return mountOptions("/proc/self", f.Fd()) }), nil
}

// forgetful are options with which a file system answers a flush before the data is on the medium: without emptying the disk's
// write cache; on bcachefs without writing its journal; on f2fs going back, at the next mount, to the state of a moment before.
var forgetful = regexp.MustCompile(`^(nobarrier|barrier=0|fsync_mode=nobarrier|journal_flush_disabled(=1)?|checkpoint=disable(:.*)?)$`)

// describe applies the list. options are those of the mount, asked for where they matter. Options that cannot be read may be
// forgetful.
func describe(number uint32, options func() ([]string, error)) FileSystem {
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
		all, err := options()
		if err != nil {
			fs.Volatile = fmt.Errorf("it cannot be read how %s is mounted, and a mount may leave out what keeps flushed data: %w", k.name, err)
		}
		for _, o := range all {
			if forgetful.MatchString(o) {
				fs.Volatile = fmt.Errorf("%s is mounted with %s: what was flushed may be gone after a loss of power", k.name, o)
			}
		}
	}
	if !k.memory {
		fs.Unpinnable = fmt.Errorf("an adapter would write to the pages of %s without the kernel's knowledge, and a flush would leave its writes out: "+
			"adapters need regions in memory, on tmpfs or on huge pages", k.name)
	}
	return fs
}

// mountOptions are the options of the mount that an open file is on, and of its file system. proc is the process's folder in /proc.
func mountOptions(proc string, fd uintptr) ([]string, error) {
	info, err := os.ReadFile(filepath.Join(proc, "fdinfo", strconv.FormatUint(uint64(fd), 10)))
	if err != nil {
		return nil, err
	}
	id := ""
	for line := range strings.Lines(string(info)) {
		if rest, found := strings.CutPrefix(line, "mnt_id:"); found {
			id = strings.TrimSpace(rest)
		}
	}
	mounts, err := os.Open(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		// 36 35 98:0 /root /where rw,noatime shared:1 - ext4 /dev/vda rw,barrier=0
		mount, super, _ := strings.Cut(lines.Text(), " - ")
		fields, rest := strings.Fields(mount), strings.Fields(super)
		if len(fields) > 5 && len(rest) > 2 && fields[0] == id {
			return append(strings.Split(fields[5], ","), strings.Split(rest[2], ",")...), nil
		}
	}
	return nil, errors.Join(fmt.Errorf("%s does not name its mount %q", mounts.Name(), id), lines.Err())
}
