// Package examples has no code: its test runs the programs in its folders.
package examples
