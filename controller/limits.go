package controller

import "github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"

// defaultRequestBytes is the longest request of most procedures, which carry a name and some numbers.
const defaultRequestBytes = 8 << 10

// requestBytes are the procedures whose requests may be longer.
var requestBytes = map[string]int64{
	quarrypbconnect.ControllerHeartbeatProcedure:     64 << 10, // a row for each sick node
	quarrypbconnect.ControllerCreateNameProcedure:    16 << 10, // notes of 4 KiB
	quarrypbconnect.ControllerSwapNameProcedure:      16 << 10,
	quarrypbconnect.ControllerLookupNamesProcedure:   64 << 10,  // 100 names
	quarrypbconnect.ControllerCreateNamesProcedure:   768 << 10, // 100 names with notes
	quarrypbconnect.ControllerRegisterNodeProcedure:  512 << 10, // a row for each region of a node, which has at most 4096
	quarrypbconnect.ControllerPollJobsProcedure:      64 << 10,  // what is known of a worker's plugins
	quarrypbconnect.ControllerNodeHeartbeatProcedure: 32 << 10,  // the serials of at most 1024 sessions that have left
}

// maxBytes is the longest request to a path, in bytes.
func maxBytes(path string) int64 {
	if n := requestBytes[path]; n > 0 {
		return n
	}
	return defaultRequestBytes
}
