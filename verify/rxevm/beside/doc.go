// Package beside has the tests that need an RDMA device, in the virtual machine of rxevm or
// on a host that has one: a cluster of processes that clients reach over verbs and tcp, in
// which a node is killed. test-rdma.sh runs them; elsewhere they are skipped.
package beside
