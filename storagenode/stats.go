package storagenode

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/rpcstats"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/host"
)

// Version is this build's, told by /healthz.
var Version = "dev"

func health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(quarrypb.VersionHeader, Version)
	fmt.Fprintln(w, "ok")
}

// life counts what happens to a node.
type life struct {
	registrations atomic.Uint64
	cut           atomic.Bool // no controller answers
}

// Stats describes a node.
type Stats struct {
	Name          string               `json:"name"`
	ID            uint32               `json:"id"`
	Incarnation   uint64               `json:"incarnation"`
	TCP           string               `json:"tcp"`
	Socket        string               `json:"socket,omitempty"`
	Verbs         string               `json:"verbs,omitempty"`
	Agent         string               `json:"agent"`
	CapacityBytes uint64               `json:"capacity_bytes"`
	HostedBytes   uint64               `json:"hosted_bytes"`
	ResidentBytes uint64               `json:"resident_bytes"`
	Regions       []host.RegionStatus  `json:"regions"`
	Sessions      []host.SessionStatus `json:"sessions"`
	Counters      host.Counters        `json:"counters"`
	Adapter       *Adapter             `json:"adapter,omitempty"` // of a node that serves verbs
	Lanes         map[string]int       `json:"lanes"`             // by provider
	// Registrations so far, and whether no controller answers just now.
	Registrations uint64          `json:"registrations"`
	Cut           bool            `json:"no_controller"`
	Calls         []rpcstats.Call `json:"-"` // of controllers
	Settled       Settled         `json:"settled"`
	// FileSystem holds the regions.
	FileSystem FileSystem `json:"file_system"`
}

// Settled is what the programs over regions have found and done here.
type Settled struct {
	ScrubbedSlabs uint64 `json:"scrubbed_slabs"` // looked at
	// What sessions had left that are fenced: reservations, map bits of slabs that
	// nobody held, blocks half formatted.
	Reservations uint64 `json:"reservations"`
	MapBits      uint64 `json:"map_bits"`
	BlockHeaders uint64 `json:"block_headers"`
	CopiedBytes  uint64 `json:"copied_bytes"` // to replicas that are rebuilt
	Reclaimed    uint64 `json:"reclaimed_blocks"`
}

// settled counts for Settled.
type settled struct{ slabs, reservations, bits, headers, copied, reclaimed atomic.Uint64 }

func (s *settled) scrubbed(st *slab.Scrubbed) {
	s.slabs.Add(uint64(st.Slabs))
	s.reservations.Add(uint64(st.Taken))
	s.bits.Add(uint64(st.Bits))
	s.headers.Add(uint64(st.Headers))
}

func (s *settled) snapshot() Settled {
	return Settled{ScrubbedSlabs: s.slabs.Load(), Reservations: s.reservations.Load(), MapBits: s.bits.Load(), BlockHeaders: s.headers.Load(), CopiedBytes: s.copied.Load(), Reclaimed: s.reclaimed.Load()}
}

// Stats is a snapshot.
func (n *Node) Stats() Stats {
	s := Stats{Name: n.cfg.Name, Incarnation: n.incarnation, TCP: n.tcpAddress, Verbs: n.verbsAddress, Agent: n.agentURL, ResidentBytes: n.resident(),
		CapacityBytes: n.cfg.CapacityBytes, Registrations: n.life.registrations.Load(), Cut: n.life.cut.Load(), Calls: n.calls.Snapshot(), Settled: n.settled.snapshot(), FileSystem: n.fileSystem()}
	if n.shmListener != nil {
		s.Socket = n.cfg.Socket
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s.ID, s.HostedBytes = n.state.Node, n.state.HostedSize
	if n.access != nil {
		s.Regions, s.Sessions, s.Counters = n.access.Regions(), n.access.Sessions(), n.access.Counters()
		s.Lanes, s.Adapter = n.access.lanes(), n.access.adapter()
	}
	return s
}

// FileSystem is what the regions' memory is taken from. One that is full kills the
// node with SIGBUS when a client touches a page there is no room for.
type FileSystem struct {
	Kind           string `json:"kind"` // "memory", "hugepages", "tmpfs" or "file"
	Bytes          uint64 `json:"size_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
}

func (n *Node) fileSystem() FileSystem {
	if p := n.cfg.HugepageBytes; p != 0 {
		count := func(what string) uint64 {
			b, _ := os.ReadFile(fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB/%s_hugepages", p>>10, what))
			k, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
			return k
		}
		free := count("free")
		return FileSystem{"hugepages", count("nr") * p, (free - min(free, count("resv"))) * p}
	}
	if n.cfg.Dir == "" {
		var si unix.Sysinfo_t
		if unix.Sysinfo(&si) != nil {
			return FileSystem{Kind: "memory"}
		}
		unit := uint64(si.Unit)
		return FileSystem{"memory", uint64(si.Totalram) * unit, (uint64(si.Freeram) + uint64(si.Bufferram)) * unit}
	}
	var fs unix.Statfs_t
	if unix.Statfs(n.cfg.Dir, &fs) != nil {
		return FileSystem{Kind: "file"}
	}
	f := FileSystem{"file", fs.Blocks * uint64(fs.Bsize), fs.Bavail * uint64(fs.Bsize)}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC || fs.Type == unix.HUGETLBFS_MAGIC {
		f.Kind = "tmpfs"
	}
	return f
}
