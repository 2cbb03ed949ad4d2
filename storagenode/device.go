package storagenode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/storagenode/state"
)

// keeper keeps a node's regions and its state across restarts: a folder, or a device.
type keeper interface {
	// load reads the node's saved state.
	load() (state.Kept, error)
	// save replaces that state, encoded.
	save(b []byte) error
	// scan checks every region and then maps all. Anything that is no region, or not of this
	// cluster, stops the node: the error names it, and nothing is changed. missing are regions
	// that were here before and are not any more.
	scan(ctx context.Context, kept state.Kept) (list []found, missing []uint32, err error)
	// settle records which regions are here, when the controllers know which are missing.
	settle(here []state.Region) error
	// create makes a region, all zero but for its header, with all of its memory reserved. After
	// a crash it is there completely or not at all. host.ErrNoSpace: there is no room, and
	// nothing is left.
	create(h *proto.RegionHeader) (*host.Memory, error)
	// remove deletes a region. Preconditions: nothing touches its memory any more.
	remove(region uint32) error
	// persistence is what the memory of regions has. volatile says why it does not survive a loss
	// of power; nil: it does.
	persistence() (p pmem.Persistence, volatile, err error)
	// space is what there is for regions.
	space() FileSystem
	// note keeps why what is flushed here is not on the medium, for the next process: as far as the medium lets it.
	note(why string)
	// close gives up files and locks; mapped regions stay mapped. clean says that nothing has failed since scan: the next
	// process may rely on what the kernel has cached.
	close(clean bool)
}

// device keeps regions on device DAX.
type device struct {
	dev    *pmem.Device
	domain proto.Domain // of all its regions
	area   pmem.Mapping // of the directory, rounded up to the device's alignment
	bytes  uint64       // of the directory and of regions: all of the device but the board of one that several hosts map
	whole  *host.Memory // stands for a device that clients are sent; nil: they are not

	mu     sync.Mutex // guards dir and making; never held while a region is zeroed, which takes long
	dir    directory
	making []extent // of regions that are being made: the directory does not name them yet
}

// openDevice opens the directory of a device, which the caller closes. format makes one where there is none. shared says that several
// hosts map the device.
func openDevice(dev *pmem.Device, domain proto.Domain, format, shared bool) (_ *device, err error) {
	d := &device{dev: dev, domain: domain, bytes: dev.Bytes}
	if shared {
		if d.bytes, err = cxl.Area(dev); err != nil {
			return nil, err
		}
	}
	area := d.units(directoryBytes)
	if d.bytes < area+proto.MinRegionBytes {
		return nil, fmt.Errorf("%s has %d bytes for regions, and needs at least %d: the directory and the smallest region", dev.Path, d.bytes, area+proto.MinRegionBytes)
	}
	if d.area, err = dev.Map(0, area); err != nil {
		return nil, err
	}
	d.dir = directory{mem: d.area.Mem, flush: d.area.Flusher, bytes: d.bytes}
	err = d.dir.read()
	if errors.Is(err, errNoDirectory) {
		if format {
			err = d.dir.format()
		} else {
			err = fmt.Errorf("%w: --format makes one, and gives up what the device holds", err)
		}
	} else if err != nil {
		err = fmt.Errorf("%w; restore the device, or give up all that it holds: daxio --zero --output %s", err, dev.Path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", dev.Path, err), d.area.Unmap())
	}
	if shared {
		all := func([]byte) (uint64, error) { return dev.Align, nil }
		if d.whole, err = host.OpenDeviceMemory(dev, dev.Path, 0, dev.Align, all); err != nil {
			return nil, errors.Join(err, d.area.Unmap())
		}
	}
	for _, e := range d.dir.extents {
		if e.off%dev.Align != 0 || e.bytes%dev.Align != 0 {
			return nil, errors.Join(fmt.Errorf("%s: region %d lies at %d, %d bytes, the device's alignment is %d now: give it the one it had", dev.Path, e.region, e.off, e.bytes, dev.Align), d.area.Unmap())
		}
	}
	return d, nil
}

// units rounds up to the device's alignment.
func (d *device) units(n uint64) uint64 { return (n + d.dev.Align - 1) &^ (d.dev.Align - 1) }

// name is the region for errors.
func (d *device) name(region uint32) string { return fmt.Sprintf("%s:region-%08d", d.dev.Path, region) }

// load decodes the state that the directory has.
func (d *device) load() (state.Kept, error) {
	if len(d.dir.kept) == 0 {
		return state.Kept{}, nil
	}
	k, err := state.DecodeKept(d.dir.kept)
	if err != nil {
		return k, fmt.Errorf("%s: %w", d.dev.Path, err)
	}
	return k, nil
}

// save writes a new directory with the state.
func (d *device) save(b []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if bytes.Equal(b, d.dir.kept) {
		return nil
	}
	return d.dir.write(d.dir.extents, slices.Clone(b))
}

// scan checks and maps the regions of the directory. None can be missing: the directory is the
// only list.
func (d *device) scan(_ context.Context, kept state.Kept) (out []found, missing []uint32, err error) {
	defer func() {
		if err != nil {
			for _, f := range out {
				f.memory.Close()
			}
			out = nil
		}
	}()
	cluster := kept.Cluster
	for _, e := range d.dir.extents {
		h, m, err := d.open(e)
		if err != nil {
			return out, nil, err
		}
		out = append(out, found{memory: m, region: state.Region{Number: h.Region, UUID: h.UUID, Cluster: h.Cluster, Kind: h.Kind, Bytes: h.RegionBytes, Persistent: m.Persistent(), Epoch: h.Epoch}})
		if cluster == [16]byte{} {
			cluster = h.Cluster
		}
		switch {
		case h.Region != e.region:
			return out, nil, fmt.Errorf("%s holds region %d where its directory says %d", d.dev.Path, h.Region, e.region)
		case h.Cluster != cluster:
			return out, nil, fmt.Errorf("%s: region %d belongs to cluster %x, the node to %x", d.dev.Path, h.Region, h.Cluster, cluster)
		case h.Domain != d.domain:
			return out, nil, fmt.Errorf("%s holds region %d of the domain %v, this node serves the domain %v: start it as it was (--fabric)", d.dev.Path, h.Region, h.Domain, d.domain)
		}
	}
	return out, nil, nil
}

// settle does nothing: a directory without its regions cannot be.
func (d *device) settle([]state.Region) error { return nil }

// open maps a region and reads its header.
func (d *device) open(e extent) (h proto.RegionHeader, _ *host.Memory, err error) {
	m, err := host.OpenDeviceMemory(d.dev, d.name(e.region), e.off, e.bytes, func(b []byte) (uint64, error) {
		if h, err = proto.DecodeRegionHeader(b[:proto.RegionHeaderBytes]); err != nil {
			return 0, fmt.Errorf("region %d: %w", e.region, err)
		}
		if h.RegionBytes > e.bytes || d.units(h.RegionBytes) != e.bytes {
			return 0, fmt.Errorf("region %d: its header says %d bytes, the directory %d", e.region, h.RegionBytes, e.bytes)
		}
		return h.RegionBytes, nil
	})
	if err == nil {
		d.lend(m, e)
	}
	return h, m, err
}

// lend lets clients of a device that several hosts map have a region's memory.
func (d *device) lend(m *host.Memory, e extent) {
	if d.whole != nil {
		m.PartOf(d.whole, e.off)
	}
}

// create claims an extent, zeroes it, and then puts it into the directory.
func (d *device) create(h *proto.RegionHeader) (*host.Memory, error) {
	e, err := d.claim(h)
	if err != nil {
		return nil, err
	}
	m, err := d.prepare(e, h)
	if err := d.conclude(e, err == nil); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, err
}

// claim finds room for a region, which counts as taken until conclude.
func (d *device) claim(h *proto.RegionHeader) (extent, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	taken := d.taken()
	if slices.ContainsFunc(taken, func(e extent) bool { return e.region == h.Region }) {
		return extent{}, fmt.Errorf("%s holds a region %d already", d.dev.Path, h.Region)
	}
	e := extent{region: h.Region, bytes: d.units(h.RegionBytes)}
	var err error
	if e.off, err = gap(taken, uint64(len(d.area.Mem)), d.bytes, e.bytes); err != nil {
		return extent{}, fmt.Errorf("%s: %w", d.dev.Path, err)
	}
	d.making = append(d.making, e)
	return e, nil
}

// taken are the extents of regions, made or being made, in order of their offsets. Preconditions: d.mu is held.
func (d *device) taken() []extent { return inOrder(append(slices.Clone(d.dir.extents), d.making...)) }

// conclude ends the making of a region: with made the directory names it.
func (d *device) conclude(e extent, made bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.making = slices.DeleteFunc(d.making, func(other extent) bool { return other == e })
	if !made {
		return nil
	}
	return d.dir.write(inOrder(append(slices.Clone(d.dir.extents), e)), d.dir.kept)
}

// prepare maps an extent, zeroes it and writes the region's header. The region is whole before the directory names it.
func (d *device) prepare(e extent, h *proto.RegionHeader) (*host.Memory, error) {
	m, err := host.OpenDeviceMemory(d.dev, d.name(e.region), e.off, e.bytes, func([]byte) (uint64, error) { return h.RegionBytes, nil })
	if err != nil {
		return nil, err
	}
	if err = m.Zero(0); err == nil {
		copy(m.Bytes(), h.Encode())
		if m.Persistent() {
			err = m.Persist(0, proto.RegionHeaderBytes)
		}
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	d.lend(m, e)
	return m, nil
}

// remove takes a region out of the directory.
func (d *device) remove(region uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	extents := slices.DeleteFunc(slices.Clone(d.dir.extents), func(e extent) bool { return e.region == region })
	if len(extents) == len(d.dir.extents) {
		return nil
	}
	return d.dir.write(extents, d.dir.kept)
}

// errVolatileMedium is why regions of such a device are volatile.
var errVolatileMedium = errors.New("its medium is volatile (--medium volatile)")

// errUnlisted is why regions of a device without an NVDIMM are volatile.
var errUnlisted = errors.New("the kernel lists no NVDIMM behind it, so that it may be memory that loses its content with the power; --medium persistent says that it does not")

// persistence is that of the device: it survives a loss of power where the kernel lists an NVDIMM or the operator says so.
func (d *device) persistence() (p pmem.Persistence, volatile, err error) {
	switch {
	case d.dev.Volatile && d.dev.Unlisted:
		volatile = errUnlisted
	case d.dev.Volatile:
		volatile = errVolatileMedium
	}
	return d.area.Persistence(), volatile, nil
}

// note does nothing: the kernel caches nothing of a device.
func (d *device) note(string) {}

// close unmaps the directory.
func (d *device) close(bool) {
	d.area.Unmap()
	if d.whole != nil {
		d.whole.Close()
	}
}

// space is the state of the device for FileSystem.
func (d *device) space() FileSystem {
	d.mu.Lock()
	defer d.mu.Unlock()
	return FileSystem{"devdax", d.bytes, free(d.taken(), uint64(len(d.area.Mem)), d.bytes)}
}
