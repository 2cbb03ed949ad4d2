// Package models runs the Spin models of docs/models as tests.
//
// A model is checked in three ways. The search of the design must end without an error.
// The search of each deliberate mistake (a BUG_ define) must find it, by the rule that the
// mistake breaks. Each WITNESS_ state must be reached, because a model in which nothing
// happens is also free of errors.
//
// The tests need Spin and a C compiler and are skipped where one is missing. -short runs
// the smallest bounds; MODELS=all in the environment adds the searches that take minutes.
// The package has no product code.
package models
