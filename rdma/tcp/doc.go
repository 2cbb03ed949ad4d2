// Package tcp is the fabric over sockets: verbs travel in frames and are executed
// by the node's process on the regions it has mapped. It needs no RDMA adapter
// and works between hosts.
//
// One connection is one lane. A chain is one frame, written with one system call;
// so is its answer. All integers are little endian.
//
//	hello     | magic:8 | ticket:72 | lane:4 | 0:4 |
//	welcome   | magic:8 | code:4 | node:4 | incarnation:8 |
//
//	request   | bytes behind this word:4 | kind:1 | 0:1 | verbs:2 | slot:4 | 0:4 | key:8 | body |
//	  chain   verbs, one after the other:
//	          | op:1 | flags:1 | 0:2 | len:4 | offset:8 |  then
//	          WRITE the bytes, padded to 8; CAS | expect:8 | new:8 |; FETCH_ADD | addend:8 |;
//	          FLUSH | bytes:8 |
//	  open    | region:4 | 0:4 | epoch:8 |  slot is the client's choice
//
//	answer    | bytes behind this word:4 | code:2 | done:2 | body |
//	  chain   of each verb that has run: READ the bytes, padded to 8; CAS, FETCH_ADD | old:8 |
//	  open    | key:8 | bytes:8 |
//
// code is 0, or the position of the cause in rdma.Refusals from 1, or 0xffff for
// a node that cannot tell what happened.
//
// A connection that sends a frame which is not of this form is closed: a peer
// that lies about lengths costs one connection and the memory of one frame.
package tcp
