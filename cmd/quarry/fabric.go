package main

import (
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/storagenode"
)

// rdma is how a storage node serves RDMA by the flags that clients have too: a node
// that is to be reached by shm or tcp alone keeps its regions in the domain of its
// processors.
func (a *app) rdma(listen string) storagenode.RDMA {
	r := storagenode.RDMA{Fabric: storagenode.FabricAuto, Listen: listen, Device: a.cli.RDMADevice}
	switch {
	case a.cli.RDMA || a.cli.Transport == client.TransportVerbs:
		r.Fabric = storagenode.FabricVerbs
	case a.cli.Transport != client.TransportAuto:
		r.Fabric = storagenode.FabricTCP
	}
	return r
}
