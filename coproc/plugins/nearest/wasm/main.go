//go:build wasip1

// The module nearest: GOOS=wasip1 GOARCH=wasm go build -o nearest.wasm ./coproc/plugins/nearest/wasm
package main

import (
	"github.com/quarrystore/quarry/coproc/guest"
	"github.com/quarrystore/quarry/coproc/plugins/nearest"
)

func main() { guest.Main(nearest.Name, nearest.Summary, nearest.New) }
