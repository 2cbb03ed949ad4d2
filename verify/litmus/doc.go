// Package litmus tests whether an RDMA device does what the protocols rely on. Each test
// runs small programs concurrently on one word or one slab, thousands of times, and counts
// the outcomes that are forbidden.
//
// A test marked must has to count none: a device that fails one loses data and must not
// carry Quarry. A test marked tells describes the device: the protocols do not rely on the
// outcome.
//
//	cas-cas        must   increments by CAS from several queue pairs: none is lost
//	add-add        must   the same by FETCH_ADD
//	write-read     must   a READ on another queue pair sees a WRITE that has completed
//	write-cas      must   a READ that sees the CAS behind a WRITE of one chain sees the WRITE
//	read-write     must   a fenced WRITE behind a READ of one chain does not overtake it
//	word           must   8 aligned bytes are never seen torn
//	flush          must   a processor sees a WRITE once the FLUSH behind it has completed
//	revoke         must   no byte changes after a session has been fenced
//	cas-write      tells  WRITEs lost to a CAS on the same word at the same time
//	cpu-adapter    tells  increments lost between a processor and the adapter
//	write-order    tells  WRITEs whose last word was seen before their first
//
// Both ends of every connection are the same device, in one process.
package litmus
