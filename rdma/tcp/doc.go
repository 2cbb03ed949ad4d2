// Package tcp carries verbs over sockets, between any two hosts. The node's CPU
// executes them: a connection is a lane of package host, served by one goroutine
// with one read and one write for each chain.
//
// # Format
//
// Version 1, little endian. A connection starts with the hello and the welcome of
// package host. From then on the client sends frames of two kinds:
//
//	chain   0 kind=1 | 1 zero | 2 verbs | 4 seq | 8 payload bytes | 12 slot | 16 key
//	        24 verbs x 32 bytes
//	        then the bytes of its WRITEs, one behind the other
//	verb    0 op | 1 flags | 2 zero | 4 bytes | 8 off | 16 expect | 24 new
//	        flags: 1 fence, 2 persistent; a FLUSH has its length in expect, a VERIFY its length in bytes and
//	        its seed in new
//	open    0 kind=2 | zeros | 4 seq | zeros | 24 open request of package host
//
// The payload is the sum of the lengths of the WRITEs. A frame that says otherwise,
// or is above the limits of a chain, ends the connection. Nothing is stored for a
// length that was merely claimed.
//
// The node answers frames in their order, a chain with one answer or, when its
// results are large, with several:
//
//	answer  0 kind=1 | 1 code | 2 done | 4 seq | 8 results bytes | 12 last
//	        16 results of the verbs since the answer before: READ its bytes,
//	        CAS, FETCH_ADD and VERIFY the 8 bytes of Old, WRITE and FLUSH nothing
//	window  0 kind=2 | zeros | 4 seq | 8 size=32 | 12 last=1 | 16 open answer of package host
//
// code is host.Code, done the number of verbs that have run. An answer whose seq is
// 2^32-1 is the node's farewell: the session has been revoked, and all
// outstanding chains were refused.
//
// A checksum is not part of it: TCP has one, and images carry checksums.
//
// # Order and revocation
//
// A large chain is executed verb by verb as it comes in. A connection cut in the
// middle leaves a prefix of it. Dialling a lane again shuts the gate of the former
// connection and waits until its handler executes nothing, before the welcome is
// sent: a Reset that returned nil has proved the old verbs dead.
package tcp
