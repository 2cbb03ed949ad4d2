// Package keyring signs what the controllers of a cluster say, and verifies it: tickets of
// sessions, and commands to storage nodes. Signatures are Ed25519 (RFC 8032).
//
// Controllers hold a [Signer]. Other processes hold a [Ring] of public keys, which
// verifies and cannot sign. Each kind of message is signed behind a label of its own, so
// that a signature of one kind is worth nothing as another.
package keyring
