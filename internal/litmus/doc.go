// Package litmus asks a device what the protocols rely on: small programs run side
// by side on one word or one slab, thousands of times, and what they see is counted.
//
// Some answers must be none: a device that gives another loses data, and must not
// carry Quarry. Others only tell what the device is like: the protocols do without.
//
//	cas-cas        must   increments by CAS from several queue pairs: none is lost
//	add-add        must   the same by FETCH_ADD
//	write-read     must   a READ on another queue pair sees a WRITE that has completed
//	write-cas      must   who sees the CAS behind a WRITE of one chain sees the WRITE
//	read-write     must   a fenced WRITE behind a READ of one chain does not overtake it
//	word           must   8 aligned bytes are never seen torn
//	flush          must   a processor sees what was written before a FLUSH that has completed
//	revoke         must   no byte changes after a session has been fenced
//	cas-write      tells  WRITEs lost to a CAS on the same word at the same time
//	cpu-adapter    tells  increments lost between a processor and the adapter
//	write-order    tells  WRITEs whose end was seen before their beginning
//
// The device talks to itself, in one process: what crosses a network is the same
// adapter's engine twice.
package litmus
