//go:build race

package client_test

// The race detector needs several times the memory.
const raceEnabled = true
