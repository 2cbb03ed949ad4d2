// A worker of one's own: a plugin, and a main function that does the rest. Storage
// nodes start it with --workers 1 --worker-command PROGRAM; by hand it takes the flags
// of quarry worker.
package main

import (
	"strconv"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/worker"
)

// lengths maps every record to the length of its value.
type lengths struct{}

func (lengths) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	return emit(key, strconv.AppendInt(nil, int64(len(value)), 10))
}

func main() {
	coproc.Register("lengths", "tells how long values are", func() coproc.Plugin { return lengths{} })
	worker.Main()
}
