// Package etcdembed runs an etcd server inside the process: the store of a
// controller that has been given no etcd of its own. Only cmd imports it, so that
// nothing else carries the server's dependencies.
//
//	srv, err := etcdembed.Start(etcdembed.Config{Dir: dir})
//	defer srv.Close()
//	cli, err := srv.Client()
package etcdembed
