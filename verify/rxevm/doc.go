// Package rxevm runs a command against a real kernel RDMA stack on a machine
// that has no RDMA adapter: it boots a small virtual machine whose kernel
// carries Soft-RoCE (rdma_rxe) and runs the command inside it.
//
//	host                                  virtual machine
//	  /          --- 9p, read-only --->     lower half of an overlay on /
//	  --out DIR  <-- 9p, writable  -->      DIR, same path
//	  stdout     <-- virtio port out --     pipe <- command
//	  stderr     <-- virtio port err --     pipe <- command
//	  control    <-- virtio port ctl -->    ready / go / exit N / fail
//	  memory     <-- serial console --      kernel messages, shown on a crash
//
// Because the guest sees the host's files at the same paths, a binary built on
// the host (cgo, go test -c, -race) runs unchanged, with the host's libibverbs.
// What it writes outside --out is gone when the machine ends.
//
// A job takes three steps:
//
//	image, err := rxevm.Prepare(ctx, rxevm.Setup{Install: true, Log: os.Stderr})
//	result, err := image.Run(ctx, rxevm.Job{Command: []string{"ibv_devinfo"}, Stdout: os.Stdout})
//	os.Exit(result.Code)
//
// Prepare returns a *MissingError if this machine cannot run the virtual machine. Callers
// then skip, and print the error: one line that names what is missing.
//
// The command finds these variables set:
//
//	RXE_DEVICE     name of the RDMA device: rxe0
//	RXE_GID_INDEX  index of the RoCE v2 GID of RXE_SELF
//	RXE_SELF       own IPv4 address
//	RXE_PEER       the address to connect to; the own one unless Job.Two
//	RXE_SELF6      own IPv6 address (also RXE_PEER6); not with Job.NativeOK
//	RXE_ROLE       both; with Job.Two server in one machine, client in the other
//	RXE_OUT        Job.OutDir, when set
//	PMEM_FSDAX     folder on a DAX file system, with Job.PmemMiB
//	PMEM_DEVDAX    device DAX, with Job.PmemMiB
//	PMEM_SHARED    device DAX that both machines have, with Job.SharedMiB
package rxevm
