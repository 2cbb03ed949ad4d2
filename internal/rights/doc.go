// Package rights says which roles may call which methods: the table in table.go, and nothing
// that is not in it. A server puts Identify in front of its handlers, which identifies the caller, and
// Allow decides from that and from the path of the request, before anything of it is decoded.
//
// docs/SECURITY.md has the table; a test compares them.
package rights

//go:generate go run ./generate
