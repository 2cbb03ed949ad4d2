package storagenode

import (
	"cmp"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/rpcstats"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/slab"
)

// Version is this build's; /healthz shows it.
var Version = "dev"

// health answers /healthz: the process runs.
func health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(quarrypb.VersionHeader, Version)
	fmt.Fprintln(w, "ok")
}

// counts counts what happens to a node.
type counts struct {
	registrations atomic.Uint64
	cut           atomic.Bool // no controller answers
	readAhead     atomic.Uint64
}

// Stats describes a node.
type Stats struct {
	Name          string               `json:"name"`
	ID            uint32               `json:"id"`
	Incarnation   uint64               `json:"incarnation"`
	TCP           string               `json:"tcp"`   // the first of Rails
	Rails         []Rail               `json:"rails"` // every address of the tcp fabric
	Socket        string               `json:"socket,omitempty"`
	Verbs         string               `json:"verbs,omitempty"`
	Agent         string               `json:"agent"`
	CapacityBytes uint64               `json:"capacity_bytes"`
	HostedBytes   uint64               `json:"hosted_bytes"`
	ResidentBytes uint64               `json:"resident_bytes"`
	Regions       []host.RegionStatus  `json:"regions"`
	Sessions      []host.SessionStatus `json:"sessions"`
	Counters      host.Counters        `json:"counters"`
	Adapter       *Adapter             `json:"adapter,omitempty"`  // the first of Adapters
	Adapters      []Adapter            `json:"adapters,omitempty"` // of a node that serves verbs, by number
	Lanes         map[string]int       `json:"lanes"`              // by provider
	WatchedWords  int                  `json:"watched_words"`      // by clients
	// Registrations so far, and whether no controller answers at present.
	Registrations uint64          `json:"registrations"`
	Cut           bool            `json:"no_controller"`
	Calls         []rpcstats.Call `json:"-"` // of controllers
	Settled       Settled         `json:"settled"`
	Executed      Executed        `json:"executed"`
	// MaxSessions and MaxLanes are what the node admits at once.
	MaxSessions int `json:"max_sessions"`
	MaxLanes    int `json:"max_lanes"`
	// Unsaved is for how long the newest state of the node could not be written; 0: it is written.
	Unsaved time.Duration `json:"unsaved_ns"`
	// ReadAheadBytes of region files the kernel was asked to read ahead of reconciles.
	ReadAheadBytes uint64 `json:"read_ahead_bytes"`
	// FileSystem holds the regions.
	FileSystem FileSystem `json:"file_system"`
	// Persistence is what a loss of power leaves of them, and how they are flushed.
	Persistence pmem.Persistence `json:"persistence"`
}

// Settled is what the programs over regions have found and done here.
type Settled struct {
	ScrubbedSlabs uint64 `json:"scrubbed_slabs"` // looked at
	// What fenced sessions had left: reservations, map bits of free slabs, half formatted
	// blocks.
	Reservations uint64 `json:"reservations"`
	MapBits      uint64 `json:"map_bits"`
	BlockHeaders uint64 `json:"block_headers"`
	CopiedBytes  uint64 `json:"copied_bytes"` // to replicas that are rebuilt
	// AlikeBytes of other replicas were not moved by a reconcile or a copy: their hash was that of the primary's.
	AlikeBytes uint64 `json:"alike_bytes"`
	// Lost counts objects of which a reconcile has found no whole image at any replica in sync, and has marked the slab.
	Lost      uint64 `json:"lost_objects"`
	Reclaimed uint64 `json:"reclaimed_blocks"`
}

// settled counts for Settled.
type settled struct{ slabs, reservations, bits, headers, copied, alike, lost, reclaimed atomic.Uint64 }

// scrubbed adds what a scrub has settled.
func (s *settled) scrubbed(st *slab.Scrubbed) {
	s.slabs.Add(uint64(st.Slabs))
	s.reservations.Add(uint64(st.Taken))
	s.bits.Add(uint64(st.Bits))
	s.headers.Add(uint64(st.Headers))
}

// snapshot reads the counters.
func (s *settled) snapshot() Settled {
	return Settled{ScrubbedSlabs: s.slabs.Load(), Reservations: s.reservations.Load(), MapBits: s.bits.Load(), BlockHeaders: s.headers.Load(), CopiedBytes: s.copied.Load(), AlikeBytes: s.alike.Load(), Lost: s.lost.Load(), Reclaimed: s.reclaimed.Load()}
}

// Stats is a snapshot.
func (n *Node) Stats() Stats {
	s := Stats{Name: n.cfg.Name, Incarnation: n.incarnation, TCP: n.tcpAddress, Rails: n.addresses(), Verbs: n.verbsAddress(), Agent: n.agentURL, ResidentBytes: n.resident(),
		CapacityBytes: n.cfg.CapacityBytes, Registrations: n.counts.registrations.Load(), Cut: n.counts.cut.Load(), Calls: n.calls.Snapshot(), Settled: n.settled.snapshot(), Executed: n.executors.snapshot(), Unsaved: n.unsavedFor(), MaxSessions: cmp.Or(n.cfg.MaxSessions, host.DefaultSessions), MaxLanes: cmp.Or(n.cfg.MaxConnections, host.DefaultLanes), FileSystem: n.medium.fileSystem(), ReadAheadBytes: n.counts.readAhead.Load(), Persistence: n.persistence}
	if n.shmListener != nil {
		s.Socket = n.cfg.Socket
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s.ID, s.HostedBytes = n.state.Node, n.state.HostedSize
	if n.access != nil {
		s.Regions, s.Sessions, s.Counters = n.access.Regions(), n.access.Sessions(), n.access.Counters()
		s.Lanes, s.Adapters, s.WatchedWords = n.access.lanes(), n.access.status(), n.access.Watched()
		if len(s.Adapters) > 0 {
			s.Adapter = &s.Adapters[0]
		}
	}
	return s
}
