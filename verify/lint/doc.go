// Package lint holds the rules of this repository as tests: what may import what,
// where unsafe and cgo may stand, what keeps protocol packages deterministic. It
// has no code beside its tests.
package lint
