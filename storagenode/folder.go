package storagenode

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/storagenode/state"
)

// folder is where a node keeps regions and memory of itself; nil for a node
// without one.
type folder struct {
	dir  string
	lock *os.File
}

const (
	keptName   = "node.state"
	lockName   = "lock"
	regionGlob = "region-*.quarry"
)

// openFolder makes or takes a folder. Nothing in it is changed.
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
	return &folder{dir: dir, lock: f}, nil
}

func (d *folder) close() {
	if d != nil {
		d.lock.Close()
	}
}

func (d *folder) path(region uint32) string {
	return filepath.Join(d.dir, fmt.Sprintf("region-%08d.quarry", region))
}

// found is a replica that was in the folder at the start.
type found struct {
	region state.Region
	memory *host.Memory
}

// scan opens every region file. A file that is no region, or not this cluster's,
// stops the node: it says which, and changes nothing.
func (d *folder) scan(kept state.Kept) (out []found, err error) {
	defer func() {
		if err != nil {
			for _, f := range out {
				f.memory.Close()
			}
		}
	}()
	paths, err := filepath.Glob(filepath.Join(d.dir, regionGlob))
	if err != nil {
		return nil, err
	}
	by := map[uint32]string{}
	for _, p := range paths {
		st, err := os.Stat(p)
		if err != nil {
			return out, fmt.Errorf("region file: %w", err)
		}
		h, err := readHeader(p)
		if err != nil {
			return out, err
		}
		if h.Region == 0 {
			// Made and never formatted: nothing was ever in it.
			if err := os.Remove(p); err != nil {
				return out, fmt.Errorf("region file: %w", err)
			}
			continue
		}
		switch {
		case kept.Cluster != [16]byte{} && h.Cluster != kept.Cluster:
			return out, fmt.Errorf("region file %s belongs to cluster %x, this node to %x: move it elsewhere", p, h.Cluster, kept.Cluster)
		case by[h.Region] != "":
			return out, fmt.Errorf("region %d is in two files, %s and %s: move one elsewhere", h.Region, by[h.Region], p)
		case d.path(h.Region) != p:
			return out, fmt.Errorf("region file %s holds region %d: rename it %s", p, h.Region, filepath.Base(d.path(h.Region)))
		case uint64(st.Size()) != h.RegionBytes:
			return out, fmt.Errorf("region file %s has %d bytes, its header says %d: it is truncated; restore it or remove it", p, st.Size(), h.RegionBytes)
		}
		by[h.Region] = p
		m, err := host.OpenMemory(p, h.RegionBytes, false)
		if err != nil {
			return out, err
		}
		out = append(out, found{memory: m, region: state.Region{Number: h.Region, UUID: h.UUID, Cluster: h.Cluster, Bytes: h.RegionBytes, Persistent: m.Persistent(), Epoch: h.Epoch}})
	}
	return out, nil
}

// readHeader reads the header of a region file; Region is 0 for one of zeros.
func readHeader(path string) (proto.RegionHeader, error) {
	f, err := os.Open(path)
	if err != nil {
		return proto.RegionHeader{}, fmt.Errorf("region file: %w", err)
	}
	defer f.Close()
	head := make([]byte, proto.RegionHeaderBytes)
	if n, err := f.ReadAt(head, 0); err != nil {
		return proto.RegionHeader{}, fmt.Errorf("region file %s: %d bytes of a header of %d: it is truncated; restore it or remove it", path, n, len(head))
	}
	zero := true
	for _, b := range head {
		zero = zero && b == 0
	}
	if zero {
		return proto.RegionHeader{}, nil
	}
	h, err := proto.DecodeRegionHeader(head)
	if err != nil {
		return h, fmt.Errorf("region file %s: %w; restore it or remove it", path, err)
	}
	return h, nil
}

// load reads what the node has kept of itself.
func (d *folder) load() (state.Kept, error) {
	p := filepath.Join(d.dir, keptName)
	b, err := os.ReadFile(p)
	if errors.Is(err, os.ErrNotExist) {
		return state.Kept{}, nil
	}
	if err != nil {
		return state.Kept{}, fmt.Errorf("state of the node: %w", err)
	}
	k, err := state.DecodeKept(b)
	if err != nil {
		return k, fmt.Errorf("%s: %w; restore it, or remove the whole folder to join as a new node", p, err)
	}
	return k, nil
}

// save replaces what the node has kept: written aside, flushed, renamed, flushed.
func (d *folder) save(k *state.Kept) error {
	if d == nil {
		return nil
	}
	p := filepath.Join(d.dir, keptName)
	f, err := os.OpenFile(p+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(k.Encode())
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(p+".new", p)
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
