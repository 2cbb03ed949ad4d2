// Package worker is a worker of jobs as a program: what `quarry worker` is, for
// plugins of one's own. This is all that such a program needs:
//
//	package main
//
//	import (
//		"github.com/quarrystore/quarry/coproc/worker"
//
//		_ "example.com/lengths" // calls coproc.Register in its init
//	)
//
//	func main() { worker.Main() }
//
// It takes the flags of `quarry worker`, so that storage nodes can start it:
//
//	quarry storage --workers 2 --worker-command ./lengths
package worker
