package btree

import "errors"

// Walk calls visit for every object of the tree that is part of it all the while:
// roots, nodes, external values, layers. Others may work on the tree meanwhile; what
// comes or goes in that time may be visited or not, and a value that moves to
// another leaf may be visited twice. level is that of a node, -1 for a value; bytes
// are those of its payload; keys those of a leaf without the layers below it.
//
// A linked object stays where the walk can find it: the nodes of a level cover all keys without
// overlap, low fences never change, and the walk goes on at the fence where the last node ended.
func (p *Program) Walk(visit func(o Object) error) error {
	p.begin()
	defer p.end()
	return p.walk(visit, TagRoot)
}

// Object is one object of a tree, as Walk finds it.
type Object struct {
	Ref   Ref
	Tag   uint32
	Level int
	Bytes int
	Keys  int
}

// walk visits a tree from the root down, level by level and each level from left to right, and
// with each leaf its external values and the layers below it. The tree may change meanwhile: the
// levels are walked by keys, and the end of a node's range leads to the next one. rootTag is the
// tag of the root: of a tree's or of a layer's.
func (p *Program) walk(visit func(o Object) error, rootTag uint32) error {
	root, err := p.read(p.root)
	if freed(err) {
		return ErrNoTree
	} else if err != nil {
		return err
	}
	top := root.level
	if err := visit(Object{Ref: p.root, Tag: rootTag, Level: top, Bytes: len(root.raw)}); err != nil {
		return err
	}
	for level := top; level > 0; level-- {
		for cursor := []byte(nil); ; {
			p.giveBack()
			pg, err := p.find(probe{key: cursor}, level)
			if errors.Is(err, errNoLevel) {
				break // the root has absorbed it
			} else if err != nil {
				return err
			}
			if err := pg.valid(); err != nil {
				return err
			}
			if pg.ref != p.root {
				if err := visit(Object{Ref: pg.ref, Tag: TagInner, Level: level, Bytes: len(pg.raw)}); err != nil {
					return err
				}
			}
			if !pg.bounded() {
				break
			}
			cursor = append(cursor[:0], pg.high...)
		}
	}
	return p.walkLeaves(Range{}, func(leaf *page, _, _ int) error {
		if err := leaf.valid(); err != nil {
			return err
		}
		layers := 0
		for i := range leaf.count {
			e, _ := leaf.leaf(i)
			if !e.external {
				continue
			}
			ref, n := e.outside()
			if !e.layer() {
				if err := visit(Object{Ref: ref, Tag: TagValue, Level: -1, Bytes: n}); err != nil {
					return err
				}
				continue
			}
			layers++
			sub := p.below(ref)
			err := sub.walk(visit, TagLayer)
			sub.end()
			if err != nil && !errors.Is(err, ErrNoTree) {
				return err
			}
		}
		o := Object{Ref: leaf.ref, Tag: TagLeaf, Bytes: len(leaf.raw), Keys: leaf.count - layers}
		if leaf.ref == p.root {
			// Visited as the root; once more for its keys.
			o.Tag, o.Bytes = rootTag, 0
		}
		return visit(o)
	})
}
