// Package beside holds tests that run beside an RDMA device, in the virtual machine
// of rxevm or on a host that has one: a whole cluster of processes, reached over
// verbs and tcp, with a node killed. test-rdma.sh runs them; elsewhere they are skipped.
package beside
