package pager

import (
	"sync/atomic"

	"github.com/quarrystore/quarry/internal/latency"
)

// counts are what the pager has done since it was started.
type counts struct {
	missing, minor, protected atomic.Uint64 // faults
	ahead, evicted, dropped   atomic.Uint64 // pages
	readBytes, written        atomic.Uint64 // bytes
	failed                    atomic.Uint64 // rounds of write-backs
}

// Stats describe a pager.
type Stats struct {
	Mappings, Spaces int
	// Pages in memory, of which some are dirty, and how many there may be.
	Pages, DirtyPages, MaxPages int
	// Faults by kind: pages that were not in memory, that were not mapped in the program, and first stores.
	Missing, Minor, Protected uint64
	// Pages that were read without a fault, that were removed for others, and that an Acquire has dropped.
	ReadAhead, Evicted, Dropped uint64
	// Bytes of spaces.
	ReadBytes, WrittenBytes uint64
	// FailedWrites are rounds of write-backs without an answer, or refused. The pages stay dirty.
	FailedWrites uint64
	// Latency of faults.
	Latency latency.Snapshot
}

// Stats returns a snapshot.
func (s *Server) Stats() Stats {
	c := &s.count
	out := Stats{Missing: c.missing.Load(), Minor: c.minor.Load(), Protected: c.protected.Load(), ReadAhead: c.ahead.Load(), Evicted: c.evicted.Load(),
		Dropped: c.dropped.Load(), ReadBytes: c.readBytes.Load(), WrittenBytes: c.written.Load(), FailedWrites: c.failed.Load(), Latency: s.latency.Snapshot()}
	s.mu.Lock()
	out.Spaces, out.Mappings = len(s.memories), len(s.links)
	s.mu.Unlock()
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	out.Pages, out.DirtyPages, out.MaxPages = s.cache.frames, s.cache.dirty, s.cache.budget
	return out
}
