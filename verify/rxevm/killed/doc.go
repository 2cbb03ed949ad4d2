// Package killed kills a virtual machine with emulated NVDIMMs at random moments while a durable cluster in it works, boots it again on
// what the NVDIMMs hold, and checks that nothing acknowledged is lost. There is nothing here but tests.
//
// The machine's processors are emulated and have no caches, so a flush that is forgotten does not show: that is for the ledgers of
// rdma/host/pmem. This shows that what real nodes, their files on a DAX file system, and controllers leave at any moment can be started again.
package killed
