//go:build simbug

package btree

// bugOn is the deliberate bug that is switched on.
var bugOn bugID

func bug(b bugID) bool { return b == bugOn }
