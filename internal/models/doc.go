// Package models runs the Spin models of docs/models as tests.
//
// A model is checked three ways. As designed it must be searched to the end
// without an error; each deliberate mistake in it (a BUG_ define) must be found,
// and by the rule that it breaks; each WITNESS_ define must be reached, because a
// model in which nothing happens is also free of errors.
//
// Spin and a C compiler are needed; where one is missing the tests are skipped.
// With -short the smallest bounds run, with MODELS=all in the environment also
// those that take minutes. The package holds no product code.
package models
