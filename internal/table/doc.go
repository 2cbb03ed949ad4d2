// Package table is the distribution table as clients hold it: an immutable value
// that a pure function merges with what controllers send.
//
//	t, err := t.Merge(answer.Table)
//
// Controllers may send late, twice and out of order, and two of them may think
// they lead: Merge never returns an older Table than it was given (hazard 16).
package table
