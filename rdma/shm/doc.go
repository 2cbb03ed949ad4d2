// Package shm reaches regions of the same host without anybody's help: the node
// sends the client the memory itself, and the client executes its verbs on it.
// There is no server on the data path, no system call, no copy beside the one
// that the verb is.
//
//	client                                   node (Server)
//	  | -- hello {ticket, lane} --------------> |  SOCK_SEQPACKET unix socket
//	  | <- welcome + gate page (memfd) -------- |  pidfd of the peer: refused if it cannot be killed
//	  | -- open {region, epoch, slot} --------> |
//	  | <- key, size + region (memfd or file) - |
//	  | == verbs on the mapped memory ========= |  nothing on the socket
//	  | <- end of stream ---------------------- |  node gone or lane ended: unmap
//
// Access is taken back by the gate (package host), and from a client that does
// not leave its chain in time by killing it. Read-only sessions get a descriptor
// that cannot be mapped for writing. A client of the node's own user, or root,
// could open the memory again by other means: it is trusted, as by the gate.
//
// A region that lives in a file is locked by whoever has it mapped for writing, so
// that a node started anew never shares it with clients of its former life.
//
// Inproc is the same without the socket, for a client in the node's own process.
package shm
