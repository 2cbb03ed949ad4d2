//go:build wasip1

// The module add: GOOS=wasip1 GOARCH=wasm go build -o add.wasm ./coproc/plugins/add/wasm
package main

import (
	"github.com/quarrystore/quarry/coproc/guest"
	"github.com/quarrystore/quarry/coproc/plugins/add"
)

func main() { guest.Main(add.Name, add.Summary, add.New) }
