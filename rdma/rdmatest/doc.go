// Package rdmatest is the contract of the fabric as tests. Every provider passes
// Run unchanged; a test of its own is for what only it has.
package rdmatest
