package mutants

import (
	"slices"
	"testing"
)

// mutant is one deliberate bug; see the package's comment.
type mutant struct {
	name  string // as docs/HAZARDS.md has it
	what  string // what the code does with it
	edits []edit
	runs  []run // each has to notice it
	slow  bool  // found by make mutants only
}

// edit replaces a text that is in a function once.
type edit struct{ in, old, new string }

// run is what has to notice the mutant: find, or a test of another package.
type run struct {
	find func(t *testing.T, m *mutant, first hint) found
	pkg  string // folder of the module
	test string // regular expression of tests
	args []string
}

// found is what a run says: nothing, or which promise was broken.
type found struct {
	Runs   int
	What   string
	Detail string
	At     string // the schedule that found it; kept as the hint of the next run
}

// all lists every mutant. Its number is its place, from 1.
var all = slices.Concat(engineMutants, slabMutants, stagedMutants, setMutants, openMutants, badMutants, allocMutants, btreeMutants, controllerMutants, nodeMutants, clientMutants, gatewayMutants, flightMutants, seamMutants, messageMutants, rawMutants, poolMutants)
