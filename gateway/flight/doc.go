// Package flight serves trees over Apache Arrow Flight.
//
//	s, err := flight.New(flight.Config{Connect: connect})
//	err = s.Serve(ctx, nil, listener)
//
// A server has no state of its own: it is a client of the cluster, or rather one client for each of its callers. Any number of servers
// serve one cluster, best one beside each storage node.
//
// GetFlightInfo cuts a tree into ranges (kv.Tree.Splits) and answers with one endpoint for each: a ticket, and the server beside the
// node that holds most of the range. DoGet scans the range of a ticket, and DoPut puts keys and values.
//
// # Whose rights
//
// A caller shows a token of the cluster (authorization: Bearer TOKEN). The server opens a session of its own for each token, with that token,
// and does everything for the caller in it. So controllers and storage nodes decide what the caller may do, as if the caller had opened the
// session itself, and the server's own rights are of no use to a caller (callers.go). Each call looks the tree's name up with the caller's token,
// so a revoked token is refused at the next call.
//
// A ticket contains no right. It says what to read, and its MAC has a key made of the caller's token: a server that is shown both can
// check it, and so every server can (ticket.go).
//
// # What a range read guarantees
//
// Each key that is in the range during the whole read comes exactly once, in order, with a value that it had at some moment of the read.
// It is not a snapshot of the range. A scan goes on from batch to batch as long as there is memory for the next one; then another scan begins behind the
// last key. No lane of the client is taken while the receiver of a stream is slow.
//
// # Memory
//
// What readers have in memory together is bounded by Config.MemoryBytes (budget.go): a batch counts twice, for itself and for what the scan has read
// ahead. A batch is built in the buffers that are sent, which serve again once gRPC has written them (message.go). What writers have is bounded by Config.PutStreams and
// Config.MessageBytes. A message of a writer is checked before package ipc decodes it (incoming.go).
package flight
