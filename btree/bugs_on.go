//go:build simbug

package btree

// bugOn is the deliberate bug that is switched on.
var bugOn bugID

func bug(b bugID) bool { return b == bugOn }

// Break switches a deliberate bug on for the simulator, by its number; 0 is none.
func Break(number int) { bugOn = bugID(number) }
