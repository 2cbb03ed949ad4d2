// Package payloadkey encrypts the payloads of a tenant with XAES-256-GCM (c2sp.org/XAES-256-GCM):
// AES-256-GCM with nonces of 24 random bytes, of which the first 12 derive the key of the message.
//
// A process draws the first 12 bytes once and uses them for 2^31 messages, and the other 12 for each
// message. So it expands a key once, and no two processes have to agree on anything. Readers keep
// the derived keys of the writers that they have met, at most 4096 of them, each of about 1 KiB.
package payloadkey
