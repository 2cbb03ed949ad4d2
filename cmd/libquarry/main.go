// Package main is libquarry, the client of Quarry for C and for languages that call C. quarry.h declares its
// functions and says what each promises; this package turns them into calls of packages client and btree/kv.
//
//	make lib    bin/lib/libquarry.so.1, quarry.h, quarry.pc and quarry.3
//
// Obligations: an exported function keeps no pointer of its caller, refuses a handle that is not open and
// lengths beyond its limits, and returns one of the three answers of package client. Numbers in quarry.h
// never change their meaning; a function that is added raises QUARRY_ABI_MINOR, and one that is removed or
// changed QUARRY_ABI_MAJOR and the library's soname.
//
// Files named *_unsafe.go have the exported functions and need cgo. Without it this is a program that says so.
package main

import (
	"fmt"
	"os"
)

// version of the library, set by the linker.
var version = "dev"

// main runs only in a program: a shared library has none.
func main() {
	fmt.Fprintln(os.Stderr, "libquarry is a shared library: build it with `make lib`")
	os.Exit(2)
}
