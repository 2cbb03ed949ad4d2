// Package main is librpmem.so.1, which has the functions of Intel's librpmem, so that programs that replicate their persistent memory by it,
// such as those on libpmemobj with a poolset file, replicate it into Quarry without a change. It turns the calls into those of package client/pool.
//
//	make lib    bin/lib/librpmem.so.1
//
// The target of a pool is quarry: for the cluster that the variables of client.ConfigFromEnvironment name, or USER@HOST for the one which that host reaches.
// docs/POOLS.md tells the rest.
//
// Obligations: the functions have the prototypes and the symbol version of librpmem 1.3; they return -1 or NULL, and set errno, where they fail.
//
// shim.c has the functions; bridge_unsafe.go what they call. Without cgo this is a program that says so.
package main

import (
	"fmt"
	"os"
)

// main runs only in a program: a shared library has none.
func main() {
	fmt.Fprintln(os.Stderr, "librpmem is a shared library: build it with `make lib`")
	os.Exit(2)
}
