// Package collect collects what controllers and storage nodes count.
//
//	registry.MustRegister(collect.NewNodes(n1, n2), collect.NewController(c))
package collect
