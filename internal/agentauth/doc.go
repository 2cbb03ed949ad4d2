// Package agentauth makes a storage node's agent obey the controllers of its own cluster only.
// Every call is signed with a controllers' key, which nodes verify with its public half: a
// node, or a reader of a call, can command no other. The signature names the cluster, the
// node, its incarnation, the method, and the bytes of the request, so that a call is good for
// what it says, where it was sent to; and it is verified before anything is decoded. A node
// that has not registered yet refuses all commands.
//
// It also carries the cluster's token, where there is one, in calls of controllers.
package agentauth
