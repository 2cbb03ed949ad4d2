package table

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Table is the distribution table at one revision. It is immutable, and so are
// the messages it holds: share it between goroutines, never write to it.
// A nil Table is the empty one at revision 0.
type Table struct {
	cluster  []byte
	revision uint64
	reclaim  uint64
	nodes    []*quarrypb.Node   // Invariant: sorted by id, each id once
	regions  []*quarrypb.Region // Invariant: sorted by id, each id once
}

var (
	// ErrForeign: the table is another cluster's.
	ErrForeign = errors.New("table of another cluster")
	// ErrGap: changes between the table at hand and the one given are missing; read the whole table.
	ErrGap = errors.New("changes of the table are missing")
	// ErrBounded: regions of the session's tenant are left out, because the caller's grants have changed.
	ErrBounded = errors.New("table of other tenants")
	// ErrBadTable: a table that no controller would send.
	ErrBadTable = errors.New("damaged table")
)

// Limits of a table; above them it is damaged, not large.
const (
	MaxNodes   = 1 << 16
	MaxRegions = 1 << 20
)

// Revision is the revision of the controller's store that the table shows.
func (t *Table) Revision() uint64 {
	if t == nil {
		return 0
	}
	return t.revision
}

// ReclaimEpoch is the newest reclaim epoch.
func (t *Table) ReclaimEpoch() uint64 {
	if t == nil {
		return 0
	}
	return t.reclaim
}

// Cluster is the cluster's uuid, 16 bytes; nil in the empty table.
func (t *Table) Cluster() []byte {
	if t == nil {
		return nil
	}
	return t.cluster
}

// Nodes are the nodes by rising id. Read only.
func (t *Table) Nodes() []*quarrypb.Node {
	if t == nil {
		return nil
	}
	return t.nodes
}

// Regions are the regions by rising id. Read only.
func (t *Table) Regions() []*quarrypb.Region {
	if t == nil {
		return nil
	}
	return t.regions
}

// Node is the node numbered id, or nil.
func (t *Table) Node(id uint32) *quarrypb.Node {
	if t == nil {
		return nil
	}
	return find(t.nodes, id)
}

// Region is the region numbered id, or nil.
func (t *Table) Region(id uint32) *quarrypb.Region {
	if t == nil {
		return nil
	}
	return find(t.regions, id)
}

// Merge returns t with in merged, or t itself where in brings nothing new: older
// tables and doubled ones are dropped. The messages of in belong to the result.
func (t *Table) Merge(in *quarrypb.Table) (*Table, error) {
	if in == nil {
		return t, nil
	}
	if len(in.Cluster) != 16 || len(in.Nodes) > MaxNodes || len(in.Regions) > MaxRegions {
		return t, fmt.Errorf("%w: cluster of %d bytes, %d nodes, %d regions", ErrBadTable, len(in.Cluster), len(in.Nodes), len(in.Regions))
	}
	if t != nil && !bytes.Equal(t.cluster, in.Cluster) {
		return t, fmt.Errorf("%w: have %x, given %x", ErrForeign, t.cluster, in.Cluster)
	}
	if in.Revision <= t.Revision() {
		return t, nil
	}
	if !in.Whole && in.SinceRevision > t.Revision() {
		return t, fmt.Errorf("%w: have revision %d, given changes since %d", ErrGap, t.Revision(), in.SinceRevision)
	}
	base := t
	if base == nil || in.Whole {
		base = &Table{}
	}
	out := &Table{cluster: in.Cluster, revision: in.Revision, reclaim: max(t.ReclaimEpoch(), in.ReclaimEpoch)}
	var err error
	if out.nodes, err = merge(base.nodes, in.Nodes, nil); err != nil {
		return t, err
	}
	if out.regions, err = merge(base.regions, in.Regions, in.DroppedRegions); err != nil {
		return t, err
	}
	if len(out.nodes) > MaxNodes || len(out.regions) > MaxRegions {
		return t, fmt.Errorf("%w: %d nodes, %d regions", ErrBadTable, len(out.nodes), len(out.regions))
	}
	// Invariant: a region's epoch never falls, also where the revision rises.
	for _, r := range in.Regions {
		if old := t.Region(r.Id); old != nil && old.Epoch > r.Epoch {
			return t, fmt.Errorf("%w: region %d goes from epoch %d back to %d", ErrBadTable, r.Id, old.Epoch, r.Epoch)
		}
	}
	return out, nil
}

type row interface{ GetId() uint32 }

func byID[R row](a, b R) int { return cmp.Compare(a.GetId(), b.GetId()) }

func find[R row](rows []R, id uint32) (none R) {
	i, ok := slices.BinarySearchFunc(rows, id, func(r R, id uint32) int { return cmp.Compare(r.GetId(), id) })
	if !ok {
		return none
	}
	return rows[i]
}

// merge returns old with the rows of in put in their places and those of gone left out.
// Preconditions: old is sorted.
func merge[R row](old, in []R, gone []uint32) ([]R, error) {
	if len(in) == 0 && len(gone) == 0 {
		return old, nil
	}
	in = slices.Clone(in)
	slices.SortFunc(in, byID[R])
	for i, r := range in {
		if r.GetId() == 0 || i > 0 && in[i-1].GetId() == r.GetId() {
			return nil, fmt.Errorf("%w: row %d is there twice or has no number", ErrBadTable, r.GetId())
		}
	}
	out := make([]R, 0, len(old)+len(in))
	for _, r := range in {
		// All old rows before r stay; one with its id goes.
		i, same := slices.BinarySearchFunc(old, r.GetId(), func(o R, id uint32) int { return cmp.Compare(o.GetId(), id) })
		out = append(append(out, old[:i]...), r)
		if same {
			i++
		}
		old = old[i:]
	}
	out = append(out, old...)
	if len(gone) > 0 {
		gone = slices.Sorted(slices.Values(gone))
		out = slices.DeleteFunc(out, func(r R) bool {
			_, dropped := slices.BinarySearch(gone, r.GetId())
			return dropped
		})
	}
	return out, nil
}
