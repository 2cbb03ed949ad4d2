//go:build race

package rdmatest

// The race detector makes pools forget on purpose.
const raceEnabled = true
