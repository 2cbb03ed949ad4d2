// Package testcluster runs a whole cluster inside a test: etcd, controllers and
// storage nodes on real sockets, regions of 16 MiB. It also has a check that a package's
// calls heed their contexts.
package testcluster
