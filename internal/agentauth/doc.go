// Package agentauth makes a storage node's agent obey its own cluster only: every
// call carries a bearer that is derived from the cluster's ticket key, which
// controllers keep and nodes learn when they register. A node that has not
// registered yet refuses all commands.
//
// It also carries the cluster's token, where there is one, in calls of controllers.
//
// The bearer is the same for every call, so it is as secret as the connection it
// travels on: across hosts, serve the agent over TLS.
package agentauth
