//go:build simbug

package slab

// Bugs is the set of deliberate bugs that are switched on.
var Bugs [BugCount]bool

func bug(b Bug) bool { return Bugs[b] }
