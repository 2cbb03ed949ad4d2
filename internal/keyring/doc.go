// Package keyring signs what the controllers of a cluster say, and verifies it: tickets of
// sessions, and commands to storage nodes. Signatures are Ed25519 (RFC 8032).
//
// Controllers hold a [Signer]. Everybody else holds a [Ring] of public keys: whoever has one
// can verify, and sign nothing. Each kind of message is signed behind a label of its own, so
// that a signature of one kind is worth nothing as another.
package keyring
