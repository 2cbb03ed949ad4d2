//go:build race

package pool_test

// The race detector allocates.
const raceEnabled = true
