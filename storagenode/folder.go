package storagenode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/storagenode/state"
)

// folder is a keeper in a file system: a file for each region, one for the state.
type folder struct {
	dir  string
	lock *os.File // held while the node runs
	// domain of the node: it refuses files of regions of another one.
	domain proto.Domain
	boot   string // id of the host's boot
	log    *slog.Logger
	caches caches

	mu     sync.Mutex // guards roster, and its file
	roster roster
}

const (
	keptName   = "node.state"
	lockName   = "lock"
	regionGlob = "region-*.quarry"
	newSuffix  = ".new" // of a file that is not complete; deleted after a crash
)

// lockPatience: clients of a node that died keep its region files locked until
// they notice, which takes them as long as the kernel takes to close a socket.
var lockPatience = 10 * time.Second // tests shorten it

const lockEvery = 50 * time.Millisecond

// openFolder opens a folder, or makes it. It changes nothing in it.
func openFolder(dir string) (*folder, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("data folder %s: %w", dir, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("data folder %s is in use by another storage node: give each its own --data", dir)
	}
	return &folder{dir: dir, lock: f, log: slog.New(slog.DiscardHandler)}, nil
}

// close gives up the lock. clean says that all of the file system's answers were good.
func (d *folder) close(clean bool) {
	d.leaveCaches(clean)
	d.lock.Close()
}

// persistence is that of the folder's file system.
func (d *folder) persistence() (p pmem.Persistence, volatile, err error) {
	fs, err := host.FileSystemOf(d.dir)
	if err == nil {
		p, err = host.PersistenceOf(d.dir)
	}
	return p, fs.Volatile, err
}

// space is that of the folder's file system, less what is left for others.
func (d *folder) space() FileSystem {
	var fs unix.Statfs_t
	if unix.Statfs(d.dir, &fs) != nil {
		return FileSystem{Kind: "file"}
	}
	f := FileSystem{"file", fs.Blocks * uint64(fs.Bsize), less(fs.Bavail*uint64(fs.Bsize), host.SpareDisk)}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC || fs.Type == unix.HUGETLBFS_MAGIC {
		f.Kind, f.AvailableBytes = "tmpfs", min(f.AvailableBytes, less(host.AvailableMemory(), host.SpareMemory))
	}
	return f
}

// path is the file of a region.
func (d *folder) path(region uint32) string {
	return filepath.Join(d.dir, fmt.Sprintf("region-%08d.quarry", region))
}

// found is a replica that was in the folder at the start.
type found struct {
	region state.Region
	memory *host.Memory
}

// scan checks every region file, then maps all but those whose cache is refused. A file that is no region, or not
// this cluster's, stops the node: the error says which, and nothing is changed.
func (d *folder) scan(ctx context.Context, kept state.Kept) (out []found, missing []uint32, err error) {
	if d.roster, err = d.readRoster(); err != nil {
		return nil, nil, err
	}
	if err = d.checkCaches(ctx); err != nil {
		return nil, nil, err
	}
	if out, err = d.open(ctx, kept); err != nil {
		return nil, nil, err
	}
	if err = d.enterCaches(); err != nil {
		for _, f := range out {
			f.memory.Close()
		}
		return nil, nil, err
	}
	return out, d.roster.compare(out), nil
}

// open maps the regions of all files, after it has checked all their headers.
func (d *folder) open(ctx context.Context, kept state.Kept) (out []found, err error) {
	defer func() {
		if err != nil {
			for _, f := range out {
				f.memory.Close()
			}
			out = nil
		}
	}()
	paths, err := d.regionPaths()
	if err != nil {
		return nil, err
	}
	paths = slices.DeleteFunc(paths, func(p string) bool { return d.caches.refused[p] != nil })
	if len(paths) > state.MaxRegions {
		return nil, fmt.Errorf("data folder %s holds %d region files, a node hosts at most %d: move some to another node", d.dir, len(paths), state.MaxRegions)
	}
	cluster, whence := kept.Cluster, d.keptPath()
	headers := make([]proto.RegionHeader, len(paths))
	byUUID := map[[16]byte]string{}
	for i, p := range paths {
		h, err := readHeader(p, d.domain)
		if err != nil {
			return nil, err
		}
		if cluster == [16]byte{} {
			cluster, whence = h.Cluster, p
		}
		switch {
		case h.Cluster != cluster:
			return nil, fmt.Errorf("region file %s belongs to cluster %x, but %s to %x: move one of them elsewhere", p, h.Cluster, whence, cluster)
		case byUUID[h.UUID] != "":
			return nil, fmt.Errorf("region %d is in two files, %s and %s: move one of them elsewhere", h.Region, byUUID[h.UUID], p)
		}
		byUUID[h.UUID], headers[i] = p, h
	}
	for i, p := range paths {
		// After all headers: two files of one region show that one is a copy.
		if h := headers[i]; d.path(h.Region) != p {
			return nil, fmt.Errorf("region file %s holds region %d: rename it %s", p, h.Region, filepath.Base(d.path(h.Region)))
		}
	}
	for i, p := range paths {
		h := headers[i]
		m, err := openPatiently(ctx, p, h.RegionBytes)
		if err != nil {
			return out, err
		}
		out = append(out, found{memory: m, region: state.Region{Number: h.Region, UUID: h.UUID, Cluster: h.Cluster, Kind: h.Kind, Bytes: h.RegionBytes, Persistent: m.Persistent(), Epoch: h.Epoch}})
	}
	leftovers, _ := filepath.Glob(filepath.Join(d.dir, regionGlob+newSuffix))
	for _, p := range leftovers {
		if err := os.Remove(p); err != nil {
			return out, fmt.Errorf("unfinished region file: %w", err)
		}
	}
	return out, nil
}

// regionPaths are the region files of the folder.
func (d *folder) regionPaths() ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(d.dir, regionGlob))
	if err != nil {
		return nil, fmt.Errorf("data folder %s: %w", d.dir, err)
	}
	return paths, nil
}

// openPatiently maps a region's file, and waits while a client of a node that died still has it
// locked.
func openPatiently(ctx context.Context, path string, bytes uint64) (*host.Memory, error) {
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	for {
		m, err := host.OpenMemory(path, bytes, false)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return m, err
		}
		select {
		case <-time.After(lockEvery):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// readHeader reads and checks the header of a region file.
func readHeader(path string, domain proto.Domain) (h proto.RegionHeader, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return h, fmt.Errorf("region file: %w", err)
	}
	if !st.Mode().IsRegular() {
		return h, fmt.Errorf("region file %s is not a regular file: move it elsewhere", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return h, fmt.Errorf("region file: %w", err)
	}
	defer f.Close()
	head := make([]byte, proto.RegionHeaderBytes)
	if n, err := f.ReadAt(head, 0); errors.Is(err, io.EOF) {
		return h, fmt.Errorf("region file %s has %d bytes, a header alone has %d: it is truncated; restore it or remove it", path, n, len(head))
	} else if err != nil {
		return h, fmt.Errorf("region file: %w", err)
	}
	if h, err = proto.DecodeRegionHeader(head); errors.Is(err, proto.ErrLayout) {
		return h, fmt.Errorf("region file %s: %w", path, err)
	} else if err != nil {
		return h, fmt.Errorf("region file %s: %w; restore it or remove it", path, err)
	}
	if uint64(st.Size()) != h.RegionBytes {
		return h, fmt.Errorf("region file %s has %d bytes, its header says %d: it is truncated or overlong; restore it or remove it", path, st.Size(), h.RegionBytes)
	}
	if h.Region == 0 || h.Domain != domain {
		return h, fmt.Errorf("region file %s holds region %d of the domain %v, this node serves the domain %v: move it to a node that does", path, h.Region, h.Domain, domain)
	}
	return h, nil
}

// create makes a region's file. It has its name only once it is whole.
func (d *folder) create(h *proto.RegionHeader) (*host.Memory, error) {
	p := d.path(h.Region)
	if err := d.giveUpRefused(p); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(p); !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("region file %s is in the way of a new region: move it elsewhere", p)
	}
	if err := d.replace(p, h.Encode(), h.RegionBytes); err != nil {
		return nil, err
	}
	m, err := host.OpenMemory(p, h.RegionBytes, false)
	if err != nil {
		return nil, err
	}
	if err := d.enroll(func(r roster) { r[h.Region] = h.UUID }); err != nil {
		return nil, errors.Join(err, m.Close(), os.Remove(p))
	}
	return m, nil
}

// remove deletes a region's file.
func (d *folder) remove(region uint32) error {
	if err := d.enroll(func(r roster) { delete(r, region) }); err != nil {
		return err
	}
	if err := os.Remove(d.path(region)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("region file: %w", err)
	}
	return d.sync()
}

func (d *folder) keptPath() string { return filepath.Join(d.dir, keptName) }

// load reads the node's saved state.
func (d *folder) load() (state.Kept, error) {
	p := d.keptPath()
	f, err := os.Open(p)
	if errors.Is(err, os.ErrNotExist) {
		return state.Kept{}, nil
	}
	if err != nil {
		return state.Kept{}, fmt.Errorf("state of the node: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, state.MaxKeptBytes+1))
	if err != nil {
		return state.Kept{}, fmt.Errorf("state of the node: %w", err)
	}
	k, err := state.DecodeKept(b)
	if err != nil {
		return k, fmt.Errorf("%s: %w; restore it, or move the whole folder elsewhere and let the node join as a new one", p, err)
	}
	return k, nil
}

// save replaces the state file.
func (d *folder) save(b []byte) error {
	return d.replace(d.keptPath(), b, uint64(len(b)))
}

// replace writes a file of some size atomically: it writes another name, flushes, renames, and
// flushes the folder. The bytes after b are zero, and reserved on disk.
func (d *folder) replace(path string, b []byte, size uint64) error {
	aside, mode := path+newSuffix, os.O_WRONLY
	if size > uint64(len(b)) {
		mode = os.O_RDWR // to reserve by a mapping
	}
	f, err := os.OpenFile(aside, mode|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && size > uint64(len(b)) {
		if err = f.Truncate(int64(size)); err == nil {
			err = host.Reserve(f, size, host.SpareDisk)
		}
		if err != nil {
			err = fmt.Errorf("file %s: %w", path, err)
		}
	}
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(aside, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(aside))
	}
	return d.sync()
}

// sync makes the names in the folder durable.
func (d *folder) sync() error {
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
