package storagenode

import "github.com/quarrystore/quarry/rdma/host/pmem"

// OnDevice has a node keep its regions on a device that a test has made.
func (c *Config) OnDevice(d *pmem.Device) { c.device = d }
