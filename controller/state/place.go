package state

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// place chooses the nodes of a new region, the primary first.
//
// Replicas lie in distinct failure domains: never two in one /dc/rack/host, and in
// distinct racks (/dc/rack) as far as there are enough with room. Among equals the
// node with most free capacity is taken. taken is what was chosen before and is
// not accounted for yet.
func (m *Machine) place(r *quarrypb.CreateRegionRequest, taken []uint64) ([]*node, *Error) {
	var able []*node
	var domains []string
	for _, n := range m.nodes {
		if n.rec.State != quarrypb.NodeState_NODE_STATE_UP || !m.up(n) ||
			r.Durability == quarrypb.Durability_DURABILITY_PMEM && !n.rec.Persistent {
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
		return nil, errorf(Precondition, "%d replicas need %d failure domains, there are %d with %s%s: start nodes in others, or ask for fewer replicas",
			r.Replicas, r.Replicas, len(domains), what, list(domains))
	}
	var room []*node
	for _, n := range able {
		if m.free(n, taken) >= r.SizeBytes {
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
			have = append(have, fmt.Sprintf("%s %s of %s", n.rec.Name, bytesText(m.free(n, taken)), bytesText(n.rec.CapacityBytes)))
		}
		return nil, errorf(Exhausted, "no capacity: each of %d replicas needs %s in a failure domain of its own; free%s", r.Replicas, bytesText(r.SizeBytes), list(have))
	}
	return chosen, nil
}

func (m *Machine) free(n *node, taken []uint64) uint64 {
	used := n.assigned
	if n.at < len(taken) {
		used += taken[n.at]
	}
	return n.rec.CapacityBytes - min(n.rec.CapacityBytes, used)
}

func hostOf(n *node) string { return n.rec.FailureDomain }

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
