//go:build !simbug

package slab

// bug says whether a deliberate bug is switched on: never in this build, so that
// the compiler removes the branch.
func bug(Bug) bool { return false }
