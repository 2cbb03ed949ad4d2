// Package guest runs a plugin at the other end of two byte streams: as a WASM
// module, or as any program that a worker has started.
//
//	//go:build wasip1
//
//	package main
//
//	func main() { guest.Main("words", "counts words", func() coproc.Plugin { return words{} }) }
//
// is built with GOOS=wasip1 GOARCH=wasm go build and uploaded with quarry job put.
// The module has no files, no network and no more memory than its worker gives it.
package guest
