package storagenode

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/host"
)

// FileSystem is what the regions' memory is taken from. Regions have all of their memory
// from the beginning; one that is full takes no further region.
type FileSystem struct {
	Kind           string `json:"kind"`            // "memory", "hugepages", "tmpfs", "file" or "devdax"
	Bytes          uint64 `json:"size_bytes"`      // in all
	AvailableBytes uint64 `json:"available_bytes"` // for further regions
}

// medium is what a node's regions are taken from.
type medium struct {
	name string // for errors and status
	page uint64 // bytes of huge pages; 0: ordinary ones
	keep keeper // nil: regions are in memory; set before the node serves

	last  FileSystem // guarded by the node's mu
	until time.Time  // when to look again
}

// lookAgain is how old an answer of left may be.
const lookAgain = time.Second

// init names the medium.
func (d *medium) init(cfg *Config) {
	d.page = cfg.HugepageBytes
	switch {
	case d.page != 0:
		d.name = fmt.Sprintf("huge pages of %d KiB", d.page>>10)
	case cfg.Dir == "":
		d.name = "memory"
	default:
		d.name = cfg.Dir
		if p, err := filepath.Abs(cfg.Dir); err == nil {
			d.name = p
		}
	}
}

// left is how many bytes further regions may take; nil if that is not known. Preconditions: the
// node's mu is held.
func (d *medium) left() *uint64 {
	if now := time.Now(); now.After(d.until) {
		d.last, d.until = d.fileSystem(), now.Add(lookAgain)
	}
	if d.last.Bytes == 0 {
		return nil
	}
	n := d.last.AvailableBytes
	return &n
}

// fileSystem reads the state of the medium. Size 0: it is not known.
func (d *medium) fileSystem() FileSystem {
	switch {
	case d.page != 0:
		free := d.pages("free")
		return FileSystem{"hugepages", d.pages("nr") * d.page, (free - min(free, d.pages("resv"))) * d.page}
	case d.keep == nil:
		var si unix.Sysinfo_t
		if unix.Sysinfo(&si) != nil {
			return FileSystem{Kind: "memory"}
		}
		return FileSystem{"memory", uint64(si.Totalram) * uint64(si.Unit), less(host.AvailableMemory(), host.SpareMemory)}
	}
	return d.keep.space()
}

// pages is one of the kernel's counts of huge pages.
func (d *medium) pages(what string) uint64 {
	b, _ := os.ReadFile(fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB/%s_hugepages", d.page>>10, what))
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// less is a - b, and 0 where that is negative.
func less(a, b uint64) uint64 { return a - min(a, b) }
