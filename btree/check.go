package btree

import (
	"bytes"
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// Report is the result of Check. Missing, Dangling, Frozen and Dead are left by clients that
// died half-way: the tree is correct with them, and the next operation that meets one repairs it.
type Report struct {
	Levels     int   `json:"levels"`
	Inner      int   `json:"inner_nodes"`
	Leaves     int   `json:"leaves"`
	Keys       int   `json:"keys"`
	Layers     int   `json:"layers"` // of keys too long for a node; they count in all but Levels
	External   int   `json:"external_values"`
	UsedBytes  int64 `json:"used_bytes"`     // of node payloads
	ValueBytes int64 `json:"external_bytes"` // of external values
	NodeBytes  int   `json:"node_bytes"`
	Missing    int   `json:"missing_entries"`
	Dangling   int   `json:"dangling_entries"`
	Frozen     int   `json:"frozen_nodes"`
	Dead       int   `json:"dead_layers"`
}

// Check walks a tree without concurrent writers and verifies that it is whole: nodes are
// valid and ordered, fences and right links chain from end to end at every level,
// every entry of a parent leads to its node or to a freed one, external values exist. reach, if not
// nil, is called with every object of the tree.
func Check(s Store, root Ref, reach func(ref Ref, tag uint32)) (Report, error) {
	var rep Report
	if reach == nil {
		reach = func(Ref, uint32) {}
	}
	err := checkTree(s, root, TagRoot, &rep, reach)
	return rep, err
}

// checkTree checks one layer and those below it.
func checkTree(s Store, root Ref, tag uint32, rep *Report, reach func(Ref, uint32)) error {
	pg, err := readChecked(s, root)
	if err != nil {
		return err
	}
	if len(pg.low) > 0 || pg.bounded() || pg.frozen() || pg.dead() && tag == TagRoot {
		return corrupt("root %v has fences %q %q, frozen %v, dead %v", root, pg.low, pg.high, pg.frozen(), pg.dead())
	}
	if pg.dead() {
		rep.Dead++
	}
	if tag == TagRoot {
		rep.Levels, rep.NodeBytes = pg.level+1, pg.class.Bytes()-nodeSlabExtra
	}
	reach(root, tag)
	rep.take(pg)
	if pg.level == 0 {
		rep.Leaves++
		return checkLeaf(s, pg, rep, reach)
	}
	for level := []*page{pg}; ; {
		rep.Inner += len(level)
		first, _ := level[0].child(0)
		below, all, err := chain(s, first, level[0].level-1, rep, reach)
		if err != nil {
			return err
		}
		if err := checkEntries(s, level, all, rep); err != nil {
			return err
		}
		if level = below; level == nil {
			rep.Leaves += len(all)
			return nil
		}
	}
}

// take counts a node.
func (r *Report) take(pg *page) {
	r.UsedBytes += int64(pg.filled())
	if pg.frozen() {
		r.Frozen++
	}
}

// readChecked reads a node and checks it by itself; the caller checks it against its neighbours.
func readChecked(s Store, ref Ref) (*page, error) {
	b, err := s.Read(ref, nil)
	if err != nil {
		return nil, err
	}
	v, err := open(b)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", ref, err)
	}
	return &page{ref: ref, view: v}, nil
}

// place is the position of a node in its level.
type place struct {
	ref Ref
	low []byte
}

// chain reads a level by its right links. Leaves are checked at once and not kept in memory.
func chain(s Store, first Ref, level int, rep *Report, reach func(Ref, uint32)) (inner []*page, all []place, err error) {
	seen := map[Ref]bool{}
	var fence []byte
	for ref := first; ; {
		if seen[ref] {
			return nil, nil, corrupt("%v is its own right neighbour", ref)
		}
		seen[ref] = true
		pg, err := readChecked(s, ref)
		if err != nil {
			return nil, nil, fmt.Errorf("level %d behind %q: %w", level, fence, err)
		}
		if pg.level != level || !bytes.Equal(pg.low, fence) {
			return nil, nil, corrupt("%v: level %d from %q, want level %d from %q", ref, pg.level, pg.low, level, fence)
		}
		rep.take(pg)
		all = append(all, place{ref, bytes.Clone(pg.low)})
		reach(ref, tagOf(level))
		if level > 0 {
			inner = append(inner, pg)
		} else if err := checkLeaf(s, pg, rep, reach); err != nil {
			return nil, nil, err
		}
		if !pg.bounded() {
			return inner, all, nil
		}
		fence, ref = pg.high, pg.right
	}
}

// checkEntries compares the entries of a level with the nodes of the one below.
func checkEntries(s Store, above []*page, below []place, rep *Report) error {
	at := make(map[Ref]*place, len(below))
	for i := range below {
		at[below[i].ref] = &below[i]
	}
	named := map[Ref]bool{}
	for _, pg := range above {
		for i := range pg.count {
			child, _ := pg.child(i)
			sep := pg.appendKey(nil, i)
			if c := at[child]; c != nil {
				if bytes.Compare(c.low, sep) > 0 {
					return corrupt("%v: entry %q leads to %v, which begins at %q", pg.ref, sep, child, c.low)
				}
				named[child] = true
				continue
			}
			c, err := readChecked(s, child)
			if err == nil && !c.frozen() {
				return corrupt("%v: entry %q leads to %v, which is not part of the level", pg.ref, sep, child)
			}
			if err != nil && !freed(err) {
				return err
			}
			rep.Dangling++
		}
	}
	for _, pg := range below {
		if !named[pg.ref] {
			rep.Missing++
		}
	}
	return nil
}

// checkLeaf checks the entries of a leaf, and reads what they lead to: values outside the leaf,
// and the trees of the layers below. An error ends the check of the whole tree.
func checkLeaf(s Store, pg *page, rep *Report, reach func(Ref, uint32)) error {
	rep.Keys += pg.count
	most := limits(pg.class, proto.Pair, pg.wide(), 0).InlineKeyBytes
	for i := range pg.count {
		e, _ := pg.leaf(i)
		if e.version > pg.stamp {
			return corrupt("leaf %v: entry %d has version %d, the leaf is at %d", pg.ref, i, e.version, pg.stamp)
		}
		if n := len(e.suffix) + pg.prefix; e.layer() != (n == most+1) || n > most+1 || e.layer() && !pg.layers() {
			return corrupt("leaf %v: entry %d has a key of %d bytes, leads to a layer: %v", pg.ref, i, n, e.layer())
		}
		if !e.external {
			continue
		}
		ref, n := e.outside()
		if e.layer() {
			rep.Keys--
			rep.Layers++
			if err := checkTree(s, ref, TagLayer, rep, reach); err != nil {
				return fmt.Errorf("layer of leaf %v, entry %d: %w", pg.ref, i, err)
			}
			continue
		}
		b, err := s.Read(ref, nil)
		if err != nil {
			return fmt.Errorf("leaf %v: value of entry %d: %w", pg.ref, i, err)
		}
		if len(b) != n {
			return corrupt("leaf %v: value of entry %d has %d bytes, not %d", pg.ref, i, len(b), n)
		}
		rep.External++
		rep.ValueBytes += int64(n)
		reach(ref, TagValue)
	}
	return nil
}
