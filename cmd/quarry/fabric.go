package main

import (
	"context"
	"strings"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/verbs"
	"github.com/quarrystore/quarry/storagenode"
)

// rdmaFlags choose an adapter and say how to use it. Flags that are not given leave what
// the text of --rdma-device says.
type rdmaFlags struct {
	Device       string `placeholder:"DEVICE" help:"RDMA device as NAME[/PORT][@ADDRESS][,OPTION=VALUE...]; default the best there is. Options are named as the flags below; rail=NAME is the network that the device is at. Several devices, comma separated: a storage node serves each region by one of them, and a client connects by all."`
	Windows      string `placeholder:"auto|on|off" help:"Memory windows of a storage node: where the adapter is seen to enforce them (auto), on or off."`
	Atomics      string `placeholder:"auto|required|agent" help:"What executes the atomics of a storage node's regions: its adapter or, if that has none, its processors (auto); its adapter, or RDMA is refused, by clients too (required); its processors (agent)."`
	TrafficClass string `placeholder:"N" help:"Traffic class on RoCE: 4 times the DSCP, such as 106; default the kernel's."`
	ServiceLevel string `placeholder:"N" help:"Service level on InfiniBand, priority on RoCE: 0 to 15; default the path's."`
	AckTimeout   string `placeholder:"TIME" help:"Acknowledgement timeout of the adapter, rounded up to 4.096us times a power of two; default 268ms."`
	Retries      string `placeholder:"N" help:"Retries before the connection is given up: 1 to 7; default 6."`
	PKey         string `name:"pkey" placeholder:"KEY" help:"Partition on InfiniBand, such as 0x8001; default the default one."`
	Spin         string `placeholder:"TIME" help:"How long a wait polls before it sleeps; default 100us."`
	Inline       string `placeholder:"BYTES" help:"Largest inline WRITE, in bytes: 0 to 128; default 128."`
}

// String is the text that verbs.ParseConfigs reads. Flags hold for each device.
func (f *rdmaFlags) String() string {
	options := ""
	for _, o := range []struct{ name, value string }{
		{"windows", f.Windows}, {"atomics", f.Atomics}, {"traffic-class", f.TrafficClass}, {"service-level", f.ServiceLevel}, {"ack-timeout", f.AckTimeout},
		{"retries", f.Retries}, {"pkey", f.PKey}, {"spin", f.Spin}, {"inline", f.Inline},
	} {
		if o.value != "" {
			options += "," + o.name + "=" + o.value
		}
	}
	return strings.Join(verbs.Split(f.Device), options+",") + options
}

// rdma is how a storage node serves RDMA by the flags that clients have too: a node
// that is to be reached by shm or tcp alone keeps its regions in the domain of its
// processors.
func (a *app) rdma(listen string) storagenode.RDMA {
	r := storagenode.RDMA{Fabric: storagenode.FabricAuto, Listen: listen, Device: a.cli.RDMADevice.String()}
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
