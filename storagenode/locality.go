package storagenode

import (
	"fmt"
	"strconv"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/ddio"
)

// switchDDIO reads where the adapter's WRITEs go first, and switches it as Config.DDIO says, until the node ends. What cannot
// be read is unknown, which counts as on; what cannot be switched is an error. root is that of the file system.
func (n *Node) switchDDIO(root string) error {
	want := map[string]host.DDIO{ddio.On: host.DDIOOn, ddio.Off: host.DDIOOff}[n.cfg.DDIO]
	if n.adapter == "" {
		if want != host.DDIOUnknown {
			return fmt.Errorf("--ddio %s: this node serves no RDMA: leave it out", n.cfg.DDIO)
		}
		return nil
	}
	if len(n.adapters) > 1 {
		// Each has a root port of its own. What is unknown counts as on.
		if want != host.DDIOUnknown {
			return fmt.Errorf("--ddio %s: this node has several adapters, whose root ports it does not switch: leave it out", n.cfg.DDIO)
		}
		return nil
	}
	port, err := ddio.Find(root, n.adapter)
	if err == nil && want != host.DDIOUnknown {
		err = port.Set(want)
	}
	if err == nil {
		n.ddio, err = port.Rely()
		n.port = port // the node's end gives it up, also that of one that does not start
	}
	switch {
	case err != nil && want != host.DDIOUnknown:
		return fmt.Errorf("--ddio %s: %w", n.cfg.DDIO, err)
	case err != nil:
		n.cfg.Logger.Debug("storage node: DDIO is unknown and counts as on", "node", n.cfg.Name, "reason", err)
	default:
		n.cfg.Logger.Info("storage node: DDIO of the adapter's root port", "node", n.cfg.Name, "adapter", n.adapter, "port", port.Address, "ddio", n.ddio.String(), "asked", want.String())
	}
	return nil
}

// bindNUMA uses the processors and the memory of one NUMA node, as Config.NUMA says.
func (n *Node) bindNUMA() error {
	if n.cfg.NUMA == "" {
		return nil
	}
	node, err := strconv.Atoi(n.cfg.NUMA)
	if n.cfg.NUMA == NUMAAuto {
		at, known := host.AdapterNUMA("/", n.adapter)
		if n.adapter == "" || !known {
			n.cfg.Logger.Info("storage node: bound to no NUMA node, since the kernel names none for an adapter", "node", n.cfg.Name, "adapter", n.adapter)
			return nil
		}
		node, err = at, nil
	}
	if err != nil {
		return fmt.Errorf("--numa %s: want auto or the number of a NUMA node", n.cfg.NUMA)
	}
	if err := host.BindToNUMA(node); err != nil {
		return fmt.Errorf("--numa %s: %w", n.cfg.NUMA, err)
	}
	p := n.numa()
	if p.Memory != nil && p.Adapter != nil && *p.Memory != *p.Adapter {
		n.cfg.Logger.Warn("storage node: the adapter reaches the regions through another NUMA node", "node", n.cfg.Name, "memory", *p.Memory, "adapter", *p.Adapter)
	}
	return nil
}

// numa says where the memory of the regions and the adapter are.
func (n *Node) numa() *quarrypb.Numa {
	p := &quarrypb.Numa{}
	memory, known := host.BoundNUMA()
	if n.cfg.device != nil {
		memory, known = host.DeviceNUMA(n.cfg.device.File) // its memory is where it is
	}
	if known {
		at := uint32(memory)
		p.Memory = &at
	}
	if adapter, known := host.AdapterNUMA("/", n.adapter); n.adapter != "" && known {
		at := uint32(adapter)
		p.Adapter = &at
	}
	return p
}
