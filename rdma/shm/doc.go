// Package shm is the fabric between processes of one host: the node sends the client the
// region's memory, and the client executes its verbs on it. There is no server on the data
// path, no system call, and no copy beside that of the verb itself.
//
//	client                                   node (Server)
//	  | -- hello {ticket, lane} --------------> |  SOCK_SEQPACKET unix socket
//	  | <- welcome + gate page (memfd) -------- |  pidfd of the peer: refused if it cannot be looked into and killed
//	  | -- open {region, epoch, slot} --------> |
//	  | <- key, size + region (memfd or file) - |
//	  | == verbs on the mapped memory ========= |  nothing on the socket
//	  | -- bell ------------------------------> |  after a request into a mailbox whose node sleeps, unless a thread sleeps there: package msg
//	  | <- end of stream ---------------------- |  node gone or lane ended: unmap
//
// Access is taken back by the gate (package host), from a client that does not leave its
// chain in time by killing it, and when its session ends by unmapping: the node looks
// whether a process still has the memory, and kills it. Read-only sessions get a descriptor
// that cannot be mapped for writing. A client of the node's own user, or root,
// could open the memory again by other means: it is trusted, as by the gate.
//
// A process that maps the file of a region for writing locks it, so that a node that was
// restarted never shares it with clients of its former incarnation.
//
// Inproc is the same without the socket, for a client in the node's own process.
package shm
