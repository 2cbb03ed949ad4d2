// Package quarrypb holds the messages and services of the control plane,
// generated from quarry.proto. TestGeneratedCodeIsCurrent checks that the
// generated code is current; `make generate` makes it so.
package quarrypb

//go:generate sh generate.sh
