//go:build wasip1

// The module search: GOOS=wasip1 GOARCH=wasm go build -o search.wasm ./coproc/plugins/search/wasm
package main

import (
	"github.com/quarrystore/quarry/coproc/guest"
	"github.com/quarrystore/quarry/coproc/plugins/search"
)

func main() { guest.Main(search.Name, search.Summary, search.New) }
