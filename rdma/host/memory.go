package host

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// Memory is the mapped memory of one replica of a region: anonymous, or a file. All of
// it is reserved when it is made or opened; see Reserve.
type Memory struct {
	name       string                       // the file's path, or the name given to NewMemory; for errors
	file       *os.File                     // closed when the last ref is released
	mapping    pmem.Mapping                 // unmapped when the last ref is released
	mem        []byte                       // of mapping
	flush      pmem.Flusher                 // of mapping; how a range is made to survive a loss of power; constant
	device     bool                         // file is of a device that other regions lie on too; constant
	whole      *Memory                      // stands for that device where its clients are sent all of it; nil: they are not
	offset     uint64                       // in file
	unpinnable error                        // why no device may write to it; nil: it may
	identity   func() (fileIdentity, error) // computed once; how /proc shows the file

	mu   sync.Mutex     // guards refs, pins and end
	refs int            // the owner's, and one for each Access that serves it
	pins int            // registrations with devices
	end  []func() error // called by the last release, before the memory is unmapped

	tenant atomic.Uint32 // see Own
}

// NewMemory makes anonymous memory, which lives as long as a process maps it.
// bytes is a whole number of pages.
func NewMemory(name string, bytes uint64) (*Memory, error) { return NewHugeMemory(name, bytes, 0) }

// NewHugeMemory is NewMemory on huge pages of a size. 0 is ordinary pages. ErrNoSpace if
// there are not enough.
func NewHugeMemory(name string, bytes, pageBytes uint64) (*Memory, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	if pageBytes != 0 {
		if pageBytes&(pageBytes-1) != 0 || bytes%pageBytes != 0 {
			return nil, fmt.Errorf("memory of %s: %d bytes do not consist of huge pages of %d: give regions a multiple of that", name, bytes, pageBytes)
		}
		flags |= unix.MFD_HUGETLB | bits.TrailingZeros64(pageBytes)<<unix.MFD_HUGE_SHIFT
	}
	fd, err := unix.MemfdCreate("quarry-"+name, flags)
	if err != nil {
		return nil, fmt.Errorf("memory of %s: memfd: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	m, err := mapMemory(name, f, bytes, true)
	if err != nil {
		f.Close()
		if pageBytes != 0 && errors.Is(err, ErrNoSpace) {
			err = fmt.Errorf("%w: not enough huge pages of %d bytes are free: raise vm.nr_hugepages", err, pageBytes)
		}
		return nil, err
	}
	// A client that shrank it would kill this process with SIGBUS. The mode keeps
	// readers of other users from opening the descriptor again for writing.
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	if err == nil {
		err = unix.Fchmod(fd, 0o600)
	}
	if err != nil {
		m.Close()
		return nil, fmt.Errorf("memory of %s: sealing its size: %w", name, err)
	}
	return m, nil
}

// OpenMemory maps the file at path, and makes it if it is missing or empty and
// create is set. ErrNoSpace if the file has holes, such as a copy may have, and there is no
// room to fill them. The file is locked: neither another node nor a client of a node
// that died can still be writing to it.
func OpenMemory(path string, bytes uint64, create bool) (*Memory, error) {
	flags := unix.O_RDWR | unix.O_CLOEXEC
	if create {
		flags |= unix.O_CREAT
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("region file: %w", err)
	}
	m, err := openMemory(f, path, bytes, create)
	if err != nil {
		f.Close()
		return nil, err
	}
	return m, nil
}

// openMemory locks a region's file, checks it and maps it. create: an empty file is made as long as
// bytes. After an error the caller closes the file.
func openMemory(f *os.File, path string, bytes uint64, create bool) (*Memory, error) {
	if err := lockFile(f, path); err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("region file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("region file %s is not a regular file", path)
	}
	fresh := st.Size() == 0 && create
	if !fresh {
		if err := checkFile(f, path, bytes, uint64(st.Size())); err != nil {
			return nil, err
		}
	}
	m, err := mapMemory(path, f, bytes, fresh)
	if err != nil {
		return nil, err
	}
	return m, nil
}

// lockFile locks a region's file. The lock belongs to the open file, which every writing client of the region shares through the descriptor it is
// sent, and holds by its mapping.
func lockFile(f *os.File, path string) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("region file %s is mapped by another storage node, or by a client of one that died: end it (%w)", path, err)
	}
	return nil
}

// checkFile refuses what is not a region of this size. A file of zeros is one
// that was made and not yet formatted.
func checkFile(f *os.File, path string, want, size uint64) error {
	if size != want {
		return fmt.Errorf("region file %s has %d bytes, the region has %d: it is truncated or belongs to another region; restore it or remove it", path, size, want)
	}
	head := make([]byte, proto.RegionHeaderBytes)
	if _, err := f.ReadAt(head, 0); err != nil {
		return fmt.Errorf("region file %s: reading its header: %w", path, err)
	}
	for _, b := range head {
		if b == 0 {
			continue
		}
		h, err := proto.DecodeRegionHeader(head)
		if errors.Is(err, proto.ErrLayout) {
			return fmt.Errorf("region file %s: %w", path, err)
		}
		if err != nil {
			return fmt.Errorf("region file %s: %w; restore it or remove it", path, err)
		}
		if h.RegionBytes != want {
			return fmt.Errorf("region file %s: its header says %d bytes, the region has %d", path, h.RegionBytes, want)
		}
		return nil
	}
	return nil
}

// mapMemory maps bytes of a file, and makes the file as long if grow is set.
func mapMemory(name string, f *os.File, bytes uint64, grow bool) (*Memory, error) {
	page := uint64(os.Getpagesize())
	if bytes == 0 || bytes%page != 0 || bytes > 1<<40 {
		return nil, fmt.Errorf("memory of %s: %d bytes: want a multiple of %d up to 1 TiB", name, bytes, page)
	}
	spare := uint64(0)
	if grow {
		spare = SpareDisk
		if err := f.Truncate(int64(bytes)); err != nil {
			return nil, fmt.Errorf("memory of %s: %w", name, err)
		}
	}
	fs, err := fileSystem(f)
	if err != nil {
		return nil, fmt.Errorf("memory of %s: %w", name, err)
	}
	if err := Reserve(f, bytes, spare); err != nil {
		return nil, fmt.Errorf("memory of %s: reserving %d bytes: %w", name, bytes, err)
	}
	mapping, err := pmem.Map(f, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, fs.Volatile == nil)
	if err != nil {
		return nil, fmt.Errorf("memory of %s: %w", name, err)
	}
	Advise(f, mapping.Mem)
	m := &Memory{name: name, file: f, mapping: mapping, mem: mapping.Mem, flush: mapping.Flusher.StopAtError(f), refs: 1, unpinnable: fs.Unpinnable}
	if mapping.Kind == pmem.KindFSDAX {
		m.unpinnable = errPinFSDAX
	}
	m.identity = sync.OnceValues(m.identify)
	return m, nil
}

// errPinFSDAX: the kernel answers EOPNOTSUPP to a long-term registration of such pages, since the file
// system may move the file to other blocks.
var errPinFSDAX = errors.New("the kernel registers no memory of a DAX file system with an adapter, because the file system may move the file's blocks: " +
	"adapters need regions on device DAX (--data /dev/daxN.M), in memory, on tmpfs or on huge pages")

// OpenDeviceMemory maps a part of a device. check sees it and says how many bytes of it are the memory's; its error is
// returned. No process can be sent a descriptor of such memory, which would be one of the whole device, unless PartOf allows it.
// Preconditions: off and bytes are multiples of the device's alignment, within it.
func OpenDeviceMemory(dev *pmem.Device, name string, off, bytes uint64, check func(mem []byte) (size uint64, err error)) (*Memory, error) {
	mapping, err := dev.Map(off, bytes)
	if err != nil {
		return nil, err
	}
	size, err := check(mapping.Mem)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", dev.Path, err), mapping.Unmap())
	}
	fd, err := unix.FcntlInt(dev.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("memory of %s: %w", name, err), mapping.Unmap())
	}
	m := &Memory{name: name, file: os.NewFile(uintptr(fd), name), mapping: mapping, mem: mapping.Mem[:size], flush: mapping.Flusher, refs: 1, device: true}
	m.identity = sync.OnceValues(m.identify)
	return m, nil
}

// PartOf says that clients over shm may be sent the memory as a descriptor of its device, at an offset of it. They can write all of
// the device then, so only processes that may open it by themselves are. whole is memory of the device that stays open; a session that was
// sent the device holds it.
// Preconditions: nothing is served yet.
func (m *Memory) PartOf(whole *Memory, offset uint64) { m.whole, m.offset = whole, offset }

// Offset is where the memory begins in the file of its descriptor.
func (m *Memory) Offset() uint64 { return m.offset }

// held is what a session holds that was sent the memory.
func (m *Memory) held() *Memory {
	if m.whole != nil {
		return m.whole
	}
	return m
}

// NewLedgerMemory makes anonymous memory that counts as persistent and whose losses of power
// the ledger shows: for tests of what is flushed.
func NewLedgerMemory(name string, bytes uint64) (*Memory, *pmem.Ledger, error) {
	m, err := NewMemory(name, bytes)
	if err != nil {
		return nil, nil, err
	}
	l := pmem.NewLedger(m.mem)
	m.flush = l.Flusher()
	return m, l, nil
}

// NewFlushedMemory makes anonymous memory that is flushed as persistent memory is, and survives no loss of power: for
// measurements of what a flush costs.
func NewFlushedMemory(name string, bytes uint64, f pmem.Flusher) (*Memory, error) {
	m, err := NewMemory(name, bytes)
	if err == nil {
		m.flush = f
	}
	return m, err
}

// Advise asks for huge pages under mapped region memory that is not a file on a disk. The
// kernel follows it if shmem_enabled is "advise", which is not its default. The first
// process that touches a page decides its size, so nodes and clients all ask. Huge pages
// affect speed only.
func Advise(f *os.File, mem []byte) {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &fs) == nil && fs.Type == unix.TMPFS_MAGIC {
		_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	}
}

// Own says which tenant's the memory is from the next epoch on that it is served under; 0 until then. Lanes of
// other tenants do not open it.
func (m *Memory) Own(tenant uint32) { m.tenant.Store(tenant) }

// Tenant is the one that Own has named.
func (m *Memory) Tenant() uint32 { return m.tenant.Load() }

// Bytes is the memory itself, shared with all processes that map it. Agents touch it
// under the rules of the region's domain.
func (m *Memory) Bytes() []byte { return m.mem }

// Peek copies len(dst) bytes at off, whole words untorn, while clients change them:
// for pictures of what the memory holds.
// Preconditions: off+len(dst) is within the memory, a multiple of 8.
func (m *Memory) Peek(dst []byte, off uint64) { copyOut(dst, m.mem, off) }

// Name is the file's path, or the name given to NewMemory.
func (m *Memory) Name() string { return m.name }

// Persistent says whether the memory survives a loss of power once flushed.
func (m *Memory) Persistent() bool { return m.flush.Persistent() }

// Failed returns the first error of writing the memory's file to the disk, also one that the kernel reported to another process; nil: there
// was none. Behind an error nothing of the memory is flushed.
func (m *Memory) Failed() error {
	if m.retain() != nil {
		return nil
	}
	defer m.release()
	return m.flush.Failed()
}

// Persistence is what the memory really has: its kind, its domain and how it is flushed.
func (m *Memory) Persistence() pmem.Persistence { return m.mapping.Persistence() }

// Persist returns when a range is on stable storage.
func (m *Memory) Persist(off, n uint64) error {
	if !m.flush.Persistent() {
		return fmt.Errorf("memory of %s: %w", m.name, rdma.ErrNotPersistent)
	}
	if off > uint64(len(m.mem)) || n > uint64(len(m.mem))-off {
		return fmt.Errorf("memory of %s: flush of %d bytes at %d is outside of its %d bytes", m.name, n, off, len(m.mem))
	}
	return m.flush.Persist(m.mem, off, n)
}

// Descriptor opens the memory once more, to be sent to another process: with
// write set the same open file, else one that cannot be mapped for writing.
func (m *Memory) Descriptor(write bool) (*os.File, error) {
	// Under the lock: after Close the file's number may belong to another file, which a lane that
	// opens the region must not be sent.
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refs == 0 {
		return nil, fmt.Errorf("memory of %s is closed", m.name)
	}
	if m.device && m.whole == nil {
		return nil, fmt.Errorf("memory of %s: a descriptor of its device would give every region: %w", m.name, rdma.ErrMapping)
	}
	if !write {
		f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", m.file.Fd()), os.O_RDONLY, 0)
		if err != nil {
			return nil, fmt.Errorf("memory of %s: opening it for reading: %w", m.name, err)
		}
		return f, nil
	}
	fd, err := unix.FcntlInt(m.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("memory of %s: %w", m.name, err)
	}
	return os.NewFile(uintptr(fd), m.name), nil
}

// Close gives up the owner's hold. The memory is unmapped when no Access serves
// it any more, so that no lane can still be executing on it.
func (m *Memory) Close() error { return m.release() }

// retain keeps the memory mapped until release. It fails if the memory has been closed.
func (m *Memory) retain() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refs == 0 {
		return fmt.Errorf("memory of %s is closed", m.name)
	}
	m.refs++
	return nil
}

// isClosed says whether the last use has ended.
func (m *Memory) isClosed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.refs == 0
}

// release ends a use. The last one unmaps the memory and closes its file.
func (m *Memory) release() error {
	m.mu.Lock()
	if m.refs == 0 {
		m.mu.Unlock()
		return fmt.Errorf("memory of %s is closed already", m.name)
	}
	m.refs--
	last, end := m.refs == 0, m.end
	m.mu.Unlock()
	if !last {
		return nil
	}
	for _, f := range end {
		if err := f(); err != nil {
			return fmt.Errorf("memory of %s stays mapped: %w", m.name, err)
		}
	}
	return errors.Join(m.mapping.Unmap(), m.flush.Forget(), m.file.Close())
}

// AtEnd has f called when the last user has released the memory, before it is unmapped. A
// user that has registered it with a device deregisters it there. After an error of f the
// memory stays mapped.
func (m *Memory) AtEnd(f func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refs == 0 {
		return fmt.Errorf("memory of %s is closed", m.name)
	}
	m.end = append(m.end, f)
	return nil
}

// TouchedBytes is how much of the memory has storage: what the file's blocks say.
func (m *Memory) TouchedBytes() uint64 {
	if m.device {
		return uint64(len(m.mem))
	}
	st, err := m.file.Stat()
	if err != nil {
		return 0
	}
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return uint64(s.Blocks) * 512
	}
	return 0
}
