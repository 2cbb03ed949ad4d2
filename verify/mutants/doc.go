// Package mutants shows that the tests can fail. A mutant is the product with one line of
// the protocol left out; a run that has to notice is part of it. It has no code beside its
// tests.
//
//	go test -v ./verify/mutants               every mutant but the slow ones
//	make mutants                              all of them
//	go test -v ./verify/mutants -run TestMutants -args -only "primary first"
//
// # What a mutant is
//
// An entry of the lists slab_test.go, alloc_test.go and so on: its name, what it leaves
// out, edits, and a run. An edit names a function as a stack trace does, and replaces a
// text that is in that function once. Texts are compared as tokens: comments and line
// breaks do not matter. So the source of the product holds no trace of any mutant.
//
// A run plays schedules of verify/sim or verify/clientsim, and reports the promise that was
// broken; or it names an ordinary test of some package, which has to fail.
//
// # How it is built
//
// All mutants are built at once, with go build -overlay: the sources of the product
// are copied to a temporary directory, each function that a mutant edits there twice. The
// second one has the edits, and the first one begins with
//
//	if mutant__.Is(7) { return l.read__mutant7(o) }
//
// A process runs the mutant whose number is in the environment (package selected). Each
// mutant gets a process of its own, so that a panic or an endless loop is its own as well.
//
// # Hints
//
// testdata/first.json says which schedule found a mutant when the table was written last. It is
// played first; where it finds nothing any more, the whole search follows, up to the budget.
// So an old file costs time and hides nothing; -table searches without hints and writes new
// ones, with -only NAME for these alone.
//
// # What fails
//
// TestMutantsApply: an edit's function or text is not there once, for the code has changed.
// Look at what the mutant leaves out: give the edit the new text of that line. Where the
// line is gone for good because the protocol needs it no more, delete the mutant and its
// row of docs/HAZARDS.md, and say why in the commit.
//
// TestMutants: a mutant's code was never called, or its run found nothing. Either the
// check that found it is gone, or the run is not about it any more. Never raise a budget
// before you know which.
//
// TestHazardsNamesEveryMutant: section 2 of docs/HAZARDS.md has other rows than the list.
// go test ./verify/mutants -run TestMutants -args -all -table writes the table.
//
// # How to add one
//
// Write the entry; an expression that can be left out is the best edit. Give it the first
// run that comes to mind, see in how many schedules it is found (-v prints that), and make
// its budget some ten times as many, for the next change of the protocol deals all
// schedules anew. One that costs more than 20 seconds is slow: true, and found by make
// mutants only. Name it in the row of docs/HAZARDS.md whose hazard the line
// prevents, and write the table.
package mutants
