// Package space gives programs ranges of virtual addresses whose bytes lie in the memory of storage nodes: the same address
// is the same byte at every client (US 12,386,765, FIG. 2A-2C).
//
//	virtual address = base + index * region + offset
//
// A space consists of raw regions of one size, 2 GiB unless it was made smaller. Its base is chosen when it is made, from 0x1000_0000_0000 on,
// and never changes; nor does the address of a byte when its region moves to another node or fails over.
//
// # What is atomic
//
// Words of 8 bytes at multiples of 8, and nothing else: a Read beside a Write of the same bytes may return some old and some new ones. If two Writes
// change the same bytes at the same time, each byte is that of one of the two, and replicas may differ in which. Programs order
// such accesses by words (CAS64, Add64), which linearize over all clients and transports, and across failovers. What was acknowledged
// survives the loss of all replicas but one; in a durable space also the loss of power.
//
// A Space is safe for concurrent use. Its methods without a context are those of package io.
package space
