// Package slabtest runs slab programs in tests: real nodes on a real fabric, without a
// controller. The test itself fences sessions and opens epochs.
package slabtest
