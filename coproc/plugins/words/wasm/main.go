//go:build wasip1

// The module words: GOOS=wasip1 GOARCH=wasm go build -o words.wasm ./coproc/plugins/words/wasm
package main

import (
	"github.com/quarrystore/quarry/coproc/guest"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

func main() { guest.Main(words.Name, words.Summary, words.New) }
