package main

import (
	"context"
	"strings"

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

// measured is what a benchmark of a cluster compares where no fabric is named: the
// best that its nodes serve, and tcp.
func (a *app) measured(ctx context.Context) ([]string, error) {
	s, err := a.status(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range s.Nodes {
		for _, e := range n.Endpoints {
			if strings.HasPrefix(e, client.TransportVerbs+":") {
				return []string{client.TransportVerbs, client.TransportTCP}, nil
			}
		}
	}
	return []string{client.TransportSHM, client.TransportTCP}, nil
}
