package coproc

import "errors"

var (
	// ErrNoKey: the tree has no such key.
	ErrNoKey = errors.New("no such key")
	// ErrOutside: the part may not write there.
	ErrOutside = errors.New("outside of what this part may write")
)
