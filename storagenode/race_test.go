//go:build race

package storagenode_test

// The race detector needs several times the memory.
const raceEnabled = true
