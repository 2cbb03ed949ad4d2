//go:build cgo && verbs

package verbs

// #cgo LDFLAGS: -lrdmacm -libverbs
// #cgo noescape q_post
// #cgo nocallback q_post
// #cgo noescape q_wait
// #cgo nocallback q_wait
// #cgo noescape q_once
// #cgo nocallback q_once
// #cgo noescape q_poll
// #cgo nocallback q_poll
// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Built says whether this program can use RDMA devices.
const Built = true

// maxReads bounds the READs and atomics under way on one queue pair: adapters
// keep 16, more would have to be negotiated down.
const maxReads = 16

// Capability bits that the headers of rdma-core 44 do not name.
const (
	capFlushGlobal     = 1 << 38
	capFlushPersistent = 1 << 39
	capAtomicWrite     = 1 << 40
)

// device is an open adapter with the port and address chosen.
type device struct {
	ctx    *C.struct_ibv_context // the library's handle
	config Config                // with defaults
	caps   Caps                  // of the port and address chosen
	scope  uint32                // interface that has the address
}

// candidate is one address of one port of one device.
type candidate struct {
	device *C.struct_ibv_device // in the library's list, until that is freed
	caps   Caps                 // of this port and address
	scope  uint32               // interface that has the address
	score  int                  // the candidate with the highest one is chosen
}

// maxCandidates bounds how many addresses are tried: namespaces that share adapters show
// each other's.
const maxCandidates = 64

// openDevice opens the best match that this process can use. near is an address of this host
// that the peer is reached from, if known: the port that has it is preferred.
func openDevice(c Config, near netip.Addr) (*device, error) {
	var count C.int
	list := C.ibv_get_device_list(&count)
	if list == nil {
		return nil, fmt.Errorf("%w, and its kernel has no RDMA (load ib_uverbs, or give the container /dev/infiniband)", ErrNone)
	}
	defer C.ibv_free_device_list(list)
	var all []candidate
	var refused []string
	for _, d := range deviceList(list, int(count)) {
		name := C.GoString(C.ibv_get_device_name(d))
		if c.Device != "" && name != c.Device {
			continue
		}
		found, err := probe(d, name, c, near)
		if err != nil {
			refused = append(refused, err.Error())
		}
		for _, f := range found {
			f.device = d
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		switch {
		case len(refused) > 0:
			return nil, fmt.Errorf("%w: %s", ErrDevice, strings.Join(refused, "; "))
		case c.Device != "":
			return nil, fmt.Errorf("%w: there is no device %q (see ibv_devices)", ErrDevice, c.Device)
		}
		return nil, fmt.Errorf("%w (see ibv_devices; in a container, pass /dev/infiniband)", ErrNone)
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return b.score - a.score })
	return choose(all[:min(len(all), maxCandidates)], c.withDefaults())
}

// choose opens the first candidate whose address belongs to this network namespace: the
// connection manager refuses all others. If there is none it opens the first, and the
// error comes from its use.
func choose(all []candidate, c Config) (*device, error) {
	if e := C.q_manager(); e != 0 {
		return nil, fmt.Errorf("%w: %s: no connection manager: %w: load rdma_ucm, and give this user access to /dev/infiniband/rdma_cm", ErrDevice, all[0].caps.Device, unix.Errno(e))
	}
	for i := range all {
		d, err := all[i].open(c)
		if err != nil {
			return nil, err
		}
		if len(all) == 1 || d.bindable() {
			return d, nil
		}
		if err := d.close(); err != nil {
			return nil, err
		}
	}
	return all[0].open(c)
}

// open opens the device, for queue pairs and registrations.
func (f *candidate) open(c Config) (*device, error) {
	ctx := C.q_open(f.device)
	if ctx == nil {
		return nil, fmt.Errorf("%w: %s cannot be opened: give this user access to /dev/infiniband", ErrDevice, f.caps.Device)
	}
	return &device{ctx: ctx, config: c, caps: f.caps, scope: f.scope}, nil
}

// bindable says whether the connection manager lets this process use the address.
func (d *device) bindable() bool {
	var events *C.struct_rdma_event_channel
	var id *C.struct_rdma_cm_id
	at := d.at(d.caps.GID.As16(), 0)
	return C.q_watch(d.ctx, C.uint8_t(d.caps.Port), &at, &events, &id) == 0 && C.q_listen_close(events, id) == 0
}

// own is the configuration that chooses the very same device, port and address.
func (d *device) own() Config {
	c := d.config
	c.Device, c.Port, c.GID = d.caps.Device, d.caps.Port, d.caps.GID
	return c
}

// close closes the device.
// Preconditions: nothing that was made on it is left.
func (d *device) close() error { return problem("closing "+d.caps.Device, C.q_close(d.ctx)) }

// probe lists the addresses of a device that can be used, or says why there are none.
func probe(d *C.struct_ibv_device, name string, c Config, near netip.Addr) (found []candidate, err error) {
	ctx := C.q_open(d)
	if ctx == nil {
		return nil, fmt.Errorf("%s cannot be opened: give this user access to /dev/infiniband", name)
	}
	defer C.q_close(ctx)
	var a C.struct_ibv_device_attr_ex
	if e := C.ibv_query_device_ex(ctx, nil, &a); e != 0 {
		return nil, problem("asking "+name, e)
	}
	caps := Caps{
		Device: name, MaxQueuePair: int(a.orig_attr.max_qp),
		MaxReads:    int(min(a.orig_attr.max_qp_rd_atom, a.orig_attr.max_qp_init_rd_atom, maxReads)),
		Windows2B:   a.orig_attr.device_cap_flags&C.IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0,
		Flush:       a.device_cap_flags_ex&capFlushGlobal != 0,
		Persistent:  a.device_cap_flags_ex&capFlushPersistent != 0,
		AtomicWrite: a.device_cap_flags_ex&capAtomicWrite != 0,
	}
	caps.IWARP = d.transport_type == C.IBV_TRANSPORT_IWARP
	if !caps.IWARP && d.transport_type != C.IBV_TRANSPORT_IB {
		return nil, fmt.Errorf("%s has no reliable connected queue pairs of InfiniBand, RoCE or iWARP: use another adapter, or the tcp provider", name)
	}
	if caps.Atomics, err = atomicScope(name, caps.IWARP, int(a.orig_attr.atomic_cap), c.Atomics); err != nil {
		return nil, err
	}
	if caps.MaxReads < 1 {
		return nil, fmt.Errorf("%s takes no READs or atomics", name)
	}
	var down []string
	for port := 1; port <= int(a.orig_attr.phys_port_cnt); port++ {
		if c.Port != 0 && c.Port != port {
			continue
		}
		var p C.struct_ibv_port_attr
		if e := C.q_query_port(ctx, C.uint8_t(port), &p); e != 0 {
			return nil, problem(fmt.Sprintf("asking %s port %d", name, port), e)
		}
		if p.state != C.IBV_PORT_ACTIVE {
			down = append(down, fmt.Sprintf("%s port %d is not active (state %d): check the link", name, port, p.state))
			continue
		}
		if c.PKey != 0 && C.q_has_pkey(ctx, C.uint8_t(port), C.uint16_t(c.PKey), C.int(p.pkey_tbl_len)) == 0 {
			down = append(down, fmt.Sprintf("%s port %d is no member of the partition %#x: see ibv_devinfo -v, or the partitions of the subnet manager", name, port, c.PKey))
			continue
		}
		caps.Port, caps.RoCE, caps.MTU = port, p.link_layer == C.IBV_LINK_LAYER_ETHERNET, 128<<p.active_mtu
		if caps.IWARP {
			found = append(found, interfaces(name, caps, c, near)...)
		} else {
			found = append(found, addresses(ctx, caps, c, near)...)
		}
	}
	if len(found) == 0 {
		if len(down) > 0 {
			return nil, errors.New(strings.Join(down, "; "))
		}
		return nil, fmt.Errorf("%s has no port and address as configured (port %d, address %v): see ibv_devinfo -v", name, c.Port, c.GID)
	}
	return found, nil
}

// acts says whether the processors of a node execute the atomics of its regions in place of this device.
func (d *device) acts() bool { return d.caps.Acts(d.config.Atomics) }

// atomicScope is within which bounds a device's atomics are atomic. Those of an iWARP adapter are not used: its node has to tell clients
// addresses, and a node whose adapter executes atomics tells none.
func atomicScope(name string, iwarp bool, scope int, want Atomics) (string, error) {
	switch {
	case iwarp:
	case scope == C.IBV_ATOMIC_HCA:
		return "hca", nil
	case scope == C.IBV_ATOMIC_GLOB:
		return "global", nil
	}
	if want == AtomicsRequired {
		return "", fmt.Errorf("%s has no atomics of 8 bytes, which --rdma-atomics required asks for: use another adapter, or the tcp provider", name)
	}
	return noAtomics, nil
}

// addresses scores the GIDs of a port: the one the peer is reached from, then RoCE
// version 2 with IPv4, global IPv6, link-local.
func addresses(ctx *C.struct_ibv_context, caps Caps, c Config, near netip.Addr) (found []candidate) {
	var entries [256]C.struct_ibv_gid_entry
	n := int(C.ibv_query_gid_table(ctx, &entries[0], C.size_t(len(entries)), 0))
	for i := range max(n, 0) {
		e := &entries[i]
		if int(e.port_num) != caps.Port || e.gid_index > 255 {
			continue
		}
		gid := netip.AddrFrom16(gidBytes(e))
		plain := gid.Unmap()
		f := candidate{caps: caps, scope: uint32(e.ndev_ifindex)}
		f.caps.GID, f.caps.GIDIndex = plain, int(e.gid_index)
		f.score = score(plain)
		if caps.RoCE && e.gid_type == C.IBV_GID_TYPE_ROCE_V1 {
			f.score = 1
		}
		if caps.Atomics == noAtomics {
			f.score -= 1000
		}
		if near.IsValid() && plain == near.Unmap() {
			f.score += 100
		}
		if c.GID.IsValid() && plain != c.GID.Unmap() {
			continue
		}
		found = append(found, f)
	}
	return found
}

// interfaces lists the addresses of the network interface of an iWARP port, whose GIDs are none.
func interfaces(name string, caps Caps, c Config, near netip.Addr) (found []candidate) {
	b, err := os.ReadFile(fmt.Sprintf("/sys/class/infiniband/%s/ports/%d/gid_attrs/ndevs/0", name, caps.Port))
	if err != nil {
		return nil
	}
	i, err := net.InterfaceByName(strings.TrimSpace(string(b)))
	if err != nil {
		return nil
	}
	all, err := i.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		plain := p.Addr().Unmap().WithZone("")
		f := candidate{caps: caps, scope: uint32(i.Index), score: score(plain)}
		f.caps.GID = plain
		if near.IsValid() && plain == near.Unmap() {
			f.score += 100
		}
		if !c.GID.IsValid() || plain == c.GID.Unmap() {
			f.score -= 1000 // another device is better: the node's processors execute atomics
			found = append(found, f)
		}
	}
	return found
}

// score prefers IPv4, then global IPv6, then link-local.
func score(a netip.Addr) int {
	switch {
	case a.Is4():
		return 20
	case a.IsLinkLocalUnicast():
		return 5
	}
	return 10
}

// Probe says whether a device can be used, and can serve memory of this kind.
func Probe(c Config, mem []byte) (Caps, error) {
	d, err := openDevice(c, netip.Addr{})
	if err != nil {
		return Caps{}, err
	}
	pd := C.q_pd(d.ctx)
	if pd == nil {
		return d.caps, errors.Join(fmt.Errorf("%w: %s has no protection domain left", ErrDevice, d.caps.Device), d.close())
	}
	if len(mem) > 0 {
		var mr *C.struct_ibv_mr
		if mr, err = register(pd, mem, d.base(mem), d.regionAccess()); err == nil {
			err = problem("deregistering the probe", C.q_deregister(mr))
		}
	}
	return d.caps, errors.Join(err, problem("freeing a protection domain", C.q_free_pd(pd)), d.close())
}

// Devices lists every address of every usable device, and why others are not.
func Devices() ([]Caps, error) {
	var count C.int
	list := C.ibv_get_device_list(&count)
	if list == nil {
		return nil, nil
	}
	defer C.ibv_free_device_list(list)
	var all []Caps
	var errs []error
	for _, d := range deviceList(list, int(count)) {
		found, err := probe(d, C.GoString(C.ibv_get_device_name(d)), Config{}, netip.Addr{})
		errs = append(errs, err)
		for _, f := range found {
			all = append(all, f.caps)
		}
	}
	slices.SortStableFunc(all, func(a, b Caps) int { return strings.Compare(a.Device, b.Device) })
	return all, errors.Join(errs...)
}

// Live counts the verbs objects of this process.
func Live() Objects {
	var o C.q_objects
	C.q_count(&o)
	return Objects{
		Contexts: int64(o.contexts), ProtectionDomains: int64(o.pds), MemoryRegions: int64(o.mrs),
		CompletionQueues: int64(o.cqs), Channels: int64(o.channels), QueuePairs: int64(o.qps),
		ConnectionIDs: int64(o.ids), EventChannels: int64(o.event_channels), Windows: int64(o.windows),
	}
}

// problem turns the answer of the shim into an error that names the thing.
func problem(what string, e C.int) error {
	if e == 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", what, unix.Errno(e))
}

// register registers memory; errors say what to do about them.
func register(pd *C.struct_ibv_pd, mem []byte, base uint64, access C.int) (*C.struct_ibv_mr, error) {
	mr, err := C.q_register(pd, address(mem), C.uint64_t(len(mem)), C.uint64_t(base), access)
	if mr != nil {
		return mr, nil
	}
	switch {
	case errors.Is(err, unix.ENOMEM):
		return nil, fmt.Errorf("registering %d bytes: %w: raise the limit of locked memory (ulimit -l, LimitMEMLOCK=infinity, or CAP_IPC_LOCK)", len(mem), err)
	case errors.Is(err, unix.EFAULT):
		return nil, fmt.Errorf("registering %d bytes: %w: the device cannot pin this memory; use tmpfs, hugepages or a DAX file, not a file of an ordinary file system", len(mem), err)
	}
	return nil, fmt.Errorf("registering %d bytes: %w", len(mem), err)
}
