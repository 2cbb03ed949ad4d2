// Package rail chooses the way to a storage node that serves its memory at several addresses.
//
// A rail is a network that others do not share a failure with: a switch, and the adapters that are plugged into it. The operator names
// the rails. A node's table row says at which rail each of its addresses is ([quarrypb.Endpoint]); a client says which rails it is
// on, and from which of its own addresses it reaches each. Choose is the choice, a function of these and of nothing else.
//
// It is step 302 of FIG. 3A of the source 000: the client has several adapters, each of which "may be aware of which persistent memory
// servers are connected to the RDMA fabric devices", and takes the one that is connected to the fabric device that serves the region.
// FIG. 4A is nine clients with an adapter at each of three fabric devices, which connect to six servers with six regions each; a
// table test has all of it. FIG. 4B is the way by a named adapter, and FIG. 4C one that has to pass from a socket of the server to
// the other, which the choice avoids.
package rail
