// Package selected says which mutant a process runs. Only copies of source files that
// package mutants generates import it; see there.
package selected

import (
	"os"
	"strconv"
	"sync/atomic"
)

// Variable is the environment variable with the number of the mutant, from 1. Without it
// the original code runs.
const Variable = "QUARRY_MUTANT"

// Ran is the line that is written to stderr when the mutant's code is called first.
const Ran = "the mutant's code was called"

var (
	number, _ = strconv.Atoi(os.Getenv(Variable))
	told      atomic.Bool
)

// Number is the mutant that this process runs, 0 for none.
func Number() int { return number }

// Is says whether this process runs mutant n.
func Is(n int) bool {
	if n != number {
		return false
	}
	if !told.Load() && !told.Swap(true) {
		_, _ = os.Stderr.WriteString(Ran + "\n")
	}
	return true
}
