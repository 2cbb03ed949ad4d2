package redis

// Stats is what a Server has done since it started, or since CONFIG RESETSTAT.
type Stats struct {
	Clients                                  int
	Connections, Rejected, Commands, Errors  uint64
	Hits, Misses, Expired, BytesIn, BytesOut uint64
}

// Stats is a snapshot.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	clients := len(s.conns)
	s.mu.Unlock()
	k := &s.stats
	return Stats{Clients: clients, Connections: k.connections.Load(), Rejected: k.rejected.Load(), Commands: k.commands.Load(), Errors: k.errors.Load(),
		Hits: k.hits.Load(), Misses: k.misses.Load(), Expired: k.expired.Load(), BytesIn: k.bytesIn.Load(), BytesOut: k.bytesOut.Load()}
}
