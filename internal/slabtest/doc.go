// Package slabtest gives tests a small world to run slab programs in: real nodes
// on a real fabric, without a controller. Sessions are fenced by hand.
package slabtest
