package storagenode

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// This file has what a node does for the other hosts that map its device; see package cxl.

// hostPatience bounds the wait for hosts that an earlier incarnation has let onto the device.
const hostPatience = time.Minute

// openDevice opens the device that regions lie on, if there is one. A device that clients of this host were sent stays locked until the last
// client of a node that died has unmapped it.
func (n *Node) openDevice(ctx context.Context) (err error) {
	if n.cfg.device == nil && pmem.IsDevice(n.cfg.Dir) {
		ctx, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		for {
			n.cfg.device, err = pmem.OpenDevice(n.cfg.Dir)
			if !n.cfg.Shared || !errors.Is(err, unix.EWOULDBLOCK) {
				break
			}
			select {
			case <-time.After(lockEvery):
				continue
			case <-ctx.Done():
			}
			break
		}
		if err != nil {
			return err
		}
	}
	if dev := n.cfg.device; dev != nil {
		dev.Volatile = n.cfg.Medium == MediumVolatile || dev.Unlisted && n.cfg.Medium != MediumPersistent
		if dev.Unlisted && !dev.Volatile {
			n.cfg.Logger.Warn("storage node: the kernel lists no NVDIMM behind the device; that it survives a loss of power is the word of --medium persistent", "node", n.cfg.Name, "device", dev.Path)
		}
	}
	return nil
}

// shareDevice takes the device back from other hosts that earlier incarnations have let onto it.
func (n *Node) shareDevice() (err error) {
	ctx, cancel := context.WithTimeout(n.ctx, hostPatience)
	defer cancel()
	n.home, err = cxl.NewHome(ctx, n.cfg.device, cxl.HomeConfig{Host: n.cfg.Host, Forget: n.cfg.HostsGone, Format: n.cfg.Format, Incarnation: n.incarnation, Keys: &n.keys, Log: n.cfg.Logger,
		Changed: func() {
			select {
			case n.renew <- struct{}{}: // register again: the table shows where each host's clients find the memory
			default:
			}
		}})
	return err
}

// openShared has other hosts serve a region that this one serves.
func (a *access) openShared(ctx context.Context, region uint32, epoch uint64, m *host.Memory) error {
	if a.home == nil {
		return nil
	}
	return a.home.OpenRegion(ctx, region, epoch, m.Offset(), uint64(len(m.Bytes())), m.Tenant())
}
