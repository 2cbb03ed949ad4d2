package state

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"google.golang.org/protobuf/proto"
)

// This file chooses the nodes of new regions.

// placed is a region to be made: its nodes, the primary first, and its size.
type placed struct {
	nodes []*node
	bytes uint64 // of the region
}

// place chooses the nodes of a new region of r.SizeBytes among those whose pages have at
// most maxPage bytes, the primary first.
//
// Replicas lie in distinct failure domains: never two in one /dc/rack/host, and in
// distinct racks (/dc/rack) as far as there are enough with room. Among equals the
// node with most free capacity is taken. taken is what was chosen before and is
// not accounted for yet.
func (m *Machine) place(r *quarrypb.CreateRegionRequest, taken []uint64, maxPage uint64) ([]*node, *Error) {
	var able []*node
	var domains []string
	unfit := ""
	for _, n := range m.nodes {
		if n.unfit != "" {
			unfit += "; " + n.rec.Name + " is unfit: " + n.unfit
		}
		if n.rec.State != quarrypb.NodeState_NODE_STATE_UP || n.stopping || !m.up(n) || !n.suits(r.Durability) {
			continue
		}
		able = append(able, n)
		domains = append(domains, n.rec.FailureDomain)
	}
	slices.Sort(domains)
	domains = slices.Compact(domains)
	if len(domains) < int(r.Replicas) {
		what := "running storage nodes"
		if r.Durability == quarrypb.Durability_DURABILITY_PMEM {
			what = "running storage nodes with persistent memory"
		}
		return nil, errorf(Precondition, "%d replicas need %d failure domains, there are %d with %s%s: start nodes in others, or ask for fewer replicas%s",
			r.Replicas, r.Replicas, len(domains), what, list(domains), unfit)
	}
	var room []*node
	for _, n := range able {
		if m.free(n, taken) >= r.SizeBytes && n.rec.PageBytes <= maxPage && m.now >= n.fullUntil {
			room = append(room, n)
		}
	}
	// Sorted by id before: ties go to the lower id.
	slices.SortStableFunc(room, func(a, b *node) int { return cmp.Compare(m.free(b, taken), m.free(a, taken)) })
	var chosen []*node
	used := func(domain func(*node) string, n *node) bool {
		return slices.ContainsFunc(chosen, func(c *node) bool { return domain(c) == domain(n) })
	}
	for _, domain := range []func(*node) string{rackOf, hostOf} {
		for _, n := range room {
			if len(chosen) < int(r.Replicas) && !used(domain, n) {
				chosen = append(chosen, n)
			}
		}
	}
	if len(chosen) < int(r.Replicas) {
		var have []string
		for _, n := range able {
			have = append(have, m.roomText(n, taken))
		}
		return nil, errorf(Exhausted, "no capacity: each of %d replicas needs %s in a failure domain of its own; free%s", r.Replicas, bytesText(r.SizeBytes), list(have))
	}
	return chosen, nil
}

// roomText is how much room a node has, and whose fault it is that it has no more.
func (m *Machine) roomText(n *node, taken []uint64) string {
	free := bytesText(m.free(n, taken))
	switch {
	case m.now < n.fullUntil:
		return fmt.Sprintf("%s has just found no room in %s", n.rec.Name, n.rec.Medium)
	case n.capacity() < n.rec.CapacityBytes:
		return fmt.Sprintf("%s %s in %s", n.rec.Name, free, n.rec.Medium)
	}
	return fmt.Sprintf("%s %s of %s", n.rec.Name, free, bytesText(n.rec.CapacityBytes))
}

// free is how much room a node has for further replicas.
func (m *Machine) free(n *node, taken []uint64) uint64 {
	used := n.assigned
	if n.at < len(taken) {
		used += taken[n.at]
	}
	return n.capacity() - min(n.capacity(), used)
}

// placeAll chooses the nodes and the size of every region of a request. Where the request
// names no size the regions are as large as all of the kind together, so that the first
// regions are small and few regions make much memory; they are smaller where no more fits.
func (m *Machine) placeAll(r *quarrypb.CreateRegionRequest) ([]placed, *Error) {
	if r.SizeBytes != 0 {
		return m.placeWithin(r, r.Space != nil) // data of a raw region may end before its memory
	}
	r = proto.CloneOf(r)
	least := min(FirstRegionBytes, m.cfg.RegionBytes)
	size := least
	for sum := m.bytesOf(r); size < m.cfg.RegionBytes && 2*size <= sum; {
		size = min(2*size, m.cfg.RegionBytes)
	}
	for {
		r.SizeBytes = roundUp(size, wire.BlockBytes)
		sets, err := m.placeWithin(r, true)
		if err == nil || err.Code != Exhausted || size == least {
			return sets, err
		}
		size = max(size/2, least)
	}
}

// bytesOf is the size of all regions of the kind that a request asks for.
func (m *Machine) bytesOf(r *quarrypb.CreateRegionRequest) (sum uint64) {
	for _, g := range m.regions {
		if sameKind(g.rec, r) && g.rec.State != quarrypb.RegionState_REGION_STATE_LOST {
			sum += g.rec.SizeBytes
		}
	}
	return sum
}

// sameKind says whether a region is of the kind that a request without a space asks for.
func sameKind(rec *quarrypb.Region, r *quarrypb.CreateRegionRequest) bool {
	return hasSlabs(rec) && openWords(rec) == r.OpenWords && rec.Tenant == r.Tenant && rec.WantReplicas == r.Replicas && rec.Durability == r.Durability
}

// hasSlabs says whether a region holds blocks of slabs, and openWords whether their words may be open.
func hasSlabs(rec *quarrypb.Region) bool {
	return rec.Kind == quarrypb.RegionKind_REGION_KIND_SLABS || openWords(rec)
}

func openWords(rec *quarrypb.Region) bool {
	return rec.Kind == quarrypb.RegionKind_REGION_KIND_OPEN_SLABS
}

// placeWithin is placeEach within the quota of the tenant.
func (m *Machine) placeWithin(r *quarrypb.CreateRegionRequest, wholePages bool) ([]placed, *Error) {
	sets, err := m.placeEach(r, wholePages)
	if err == nil {
		err = m.roomForRegions(r, sets)
	}
	return sets, err
}

// placeEach chooses the nodes of regions of r.SizeBytes; with wholePages each region is
// rounded up to whole pages of its nodes.
func (m *Machine) placeEach(r *quarrypb.CreateRegionRequest, wholePages bool) ([]placed, *Error) {
	taken := make([]uint64, len(m.nodes))
	primaries := m.primaries()
	sets := make([]placed, r.Count)
	for i := range sets {
		p, err := m.placeOne(r, taken, wholePages)
		if err != nil {
			return nil, err
		}
		for _, n := range p.nodes {
			taken[n.at] += p.bytes
		}
		m.fewestFirst(p.nodes, primaries)
		sets[i] = p
	}
	return sets, nil
}

// placeOne chooses the nodes of one region. Nodes with large pages are left out where the
// rounded region does not fit the chosen nodes.
func (m *Machine) placeOne(r *quarrypb.CreateRegionRequest, taken []uint64, wholePages bool) (placed, *Error) {
	refused := ""
	for maxPage := uint64(math.MaxUint64); ; {
		set, err := m.place(r, taken, maxPage)
		if err != nil {
			err.Text += refused
			return placed{}, err
		}
		if !wholePages {
			return placed{set, r.SizeBytes}, nil
		}
		page := uint64(wire.BlockBytes)
		for _, n := range set {
			page = max(page, n.rec.PageBytes)
		}
		p := placed{set, roundUp(r.SizeBytes, page)}
		if !slices.ContainsFunc(set, func(n *node) bool { return m.free(n, taken) < p.bytes }) {
			return p, nil
		}
		refused = fmt.Sprintf("; on nodes with pages of %s each needs %s", bytesText(page), bytesText(p.bytes))
		maxPage = page - 1 // less than a page of some chosen node: r.SizeBytes is a multiple of BlockBytes
	}
}

// roundUp is the next multiple of unit.
func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

// hostOf is the whole failure domain of a node.
func hostOf(n *node) string { return n.rec.FailureDomain }

// rackOf is the failure domain without its host.
func rackOf(n *node) string {
	return n.rec.FailureDomain[:strings.LastIndexByte(n.rec.FailureDomain, '/')]
}

// list is ": a, b, c", cut short.
func list(items []string) string {
	const most = 8
	switch {
	case len(items) == 0:
		return ""
	case len(items) > most:
		return fmt.Sprintf(": %s and %d more", strings.Join(items[:most], ", "), len(items)-most)
	}
	return ": " + strings.Join(items, ", ")
}

// bytesText is a size for people.
func bytesText(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.4g GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.4g MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d B", n)
}
