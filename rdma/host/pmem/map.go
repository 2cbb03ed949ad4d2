package pmem

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Kinds of memory that regions lie in.
const (
	KindVolatile = "volatile" // memory, or a file of a file system that is not trusted to keep what was flushed
	KindFile     = "file"     // the page cache, written to a disk by msync
	KindFSDAX    = "fsdax"    // persistent memory through a file system
	KindDevDAX   = "devdax"   // persistent memory as a character device
)

// Persistence is what memory really has, for people.
type Persistence struct {
	Kind string `json:"kind"`
	// Domain is what a loss of power keeps of an NVDIMM; empty for other kinds.
	Domain string `json:"domain,omitempty"`
	// Flush is the Way's name: msync, clwb, and so on; none where nothing survives.
	Flush string `json:"flush"`
	// Method is the name of the rdma.FlushMethod that a node has chosen; empty where none was.
	Method string `json:"method,omitempty"`
}

// Mapping is mapped memory and how its stores are made durable.
type Mapping struct {
	Mem     []byte
	Flusher Flusher
	Kind    string
	// Region is the folder in sysfs of the NVDIMM region; empty if there is none.
	Region string
}

// Map maps bytes of a file shared, at an offset. trusted says that its file system keeps what was flushed; otherwise
// the memory counts as volatile. MAP_SYNC is tried first: where the kernel grants it, lines are flushed. It grants
// it for files of DAX mounts and for device DAX alone.
func Map(f *os.File, off int64, bytes uint64, prot int, trusted bool) (Mapping, error) {
	m, err := System.mapFile(f, off, bytes, prot, trusted)
	if err != nil || !trusted {
		return m, err
	}
	if l := ledgersInUse.Load(); l != nil {
		err = l.take(f, off, &m)
	} else if dir := SharedLedgers(); dir != "" {
		err = takeShared(dir, f, off, &m)
	}
	if err != nil {
		return Mapping{}, errors.Join(err, unix.Munmap(m.Mem))
	}
	return m, err
}

// mapFile maps a file. trusted: as persistent memory if its file system has DAX, else as a file
// whose durability is msync's; not trusted: as volatile memory.
func (s Sysfs) mapFile(f *os.File, off int64, bytes uint64, prot int, trusted bool) (Mapping, error) {
	m := Mapping{Kind: KindVolatile}
	var err error
	if trusted {
		m.Mem, err = unix.Mmap(int(f.Fd()), off, int(bytes), prot, unix.MAP_SHARED_VALIDATE|unix.MAP_SYNC)
		if err == nil {
			if err = s.direct(f, &m); err != nil {
				return Mapping{}, errors.Join(err, unix.Munmap(m.Mem))
			}
			return m, nil
		}
		// EOPNOTSUPP: no DAX. EINVAL: a kernel before 4.15.
		if err != unix.EOPNOTSUPP && err != unix.EINVAL {
			return m, fmt.Errorf("mapping %d bytes: %w", bytes, err)
		}
		m.Kind, m.Flusher = KindFile, flusherOf(Msync)
	}
	if m.Mem, err = unix.Mmap(int(f.Fd()), off, int(bytes), prot, unix.MAP_SHARED); err != nil {
		return m, fmt.Errorf("mapping %d bytes: %w", bytes, err)
	}
	return m, nil
}

// direct fills in what a mapping by MAP_SYNC has.
func (s Sysfs) direct(f *os.File, m *Mapping) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	way, err := processor()
	if err != nil {
		return err
	}
	m.Kind, m.Region = KindFSDAX, s.region("block", st.Dev)
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		m.Kind, m.Region = KindDevDAX, s.region("char", st.Rdev)
		if way == Msync {
			return fmt.Errorf("%s: device DAX has no msync, and %s leaves no instruction that writes lines back", f.Name(), FlushVariable)
		}
	}
	if way != Msync && os.Getenv(FlushVariable) == "" && domain(m.Region) == DomainCaches && s.cachesSurvive() {
		way = FenceAlone
	}
	m.Flusher = flusherOf(way)
	return nil
}

// Persistence describes the mapping.
func (m *Mapping) Persistence() Persistence {
	p := Persistence{Kind: m.Kind, Flush: m.Flusher.Way().String()}
	if m.Kind == KindFSDAX || m.Kind == KindDevDAX {
		p.Domain = domain(m.Region)
	}
	return p
}

// Unmap ends the mapping, after a deep flush where the region offers one.
func (m *Mapping) Unmap() error {
	return errors.Join(deepFlush(m.Region), unix.Munmap(m.Mem))
}
