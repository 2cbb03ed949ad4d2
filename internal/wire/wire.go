// Package wire lets a simulation carry what the processes of a cluster send to each
// other. Clients, storage nodes, controllers and fsck take a Wire in their Config; nil
// means the host's network.
package wire

import (
	"net/http"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Wire is the network of one process. Every field is set.
type Wire struct {
	// HTTP carries the calls that the process makes.
	HTTP http.RoundTripper
	// Serve makes a handler reachable under the base URL until stop is called.
	Serve func(url string, h http.Handler) (stop func())
	// Fabric connects lanes in the place of the provider tcp, whose name it has.
	Fabric rdma.Dialer
	// Lend makes a node's memory reachable at an address for dialers.
	Lend func(address string, a *host.Access)
	// Random is where the process draws what need not be secret.
	Random func() uint64
}

// Transport is w.HTTP, or the given transport where w is nil.
func (w *Wire) Transport(tcp http.RoundTripper) http.RoundTripper {
	if w != nil {
		return w.HTTP
	}
	return tcp
}

// Dialer is w.Fabric, or the given dialer where w is nil.
func (w *Wire) Dialer(tcp rdma.Dialer) rdma.Dialer {
	if w != nil {
		return w.Fabric
	}
	return tcp
}
