package btree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

const (
	// loadNodes is how many nodes of a level Load keeps before it writes them, from
	// right to left: its memory.
	loadNodes = 128
)

var (
	// ErrOrder: the input of Load is not in rising order of keys.
	ErrOrder = errors.New("keys are not in rising order")
	// ErrNotEmpty: Load builds trees from nothing.
	ErrNotEmpty = errors.New("tree is not empty")
)

// Load fills an empty tree with entries in rising order of keys. next returns them until ok is
// false. Readers see none of the entries until all are there.
//
// Linearizes at: the commit of the root.
func (p *Program) Load(next func() (key, value []byte, ok bool)) (n int, err error) {
	return p.LoadFrom(func() (key, value []byte, err error) {
		key, value, ok := next()
		if !ok {
			err = io.EOF
		}
		return key, value, err
	})
}

// LoadFrom is Load from a source that may fail: io.EOF is its end, with any other
// error nothing is loaded.
func (p *Program) LoadFrom(next func() (key, value []byte, err error)) (n int, err error) {
	p.store.Begin()
	p.begin()
	defer p.end()
	in := &input{p: p, next: next}
	if err := in.advance(); err != nil {
		return 0, err
	}
	if err := p.load(in, nil); err != nil {
		return 0, err
	}
	return in.read - 1, nil
}

// input is what Load reads, one entry ahead.
type input struct {
	p          *Program                              // whose limits the entries have to keep
	next       func() (key, value []byte, err error) // io.EOF at the end
	key, value []byte                                // valid until advance
	ok         bool                                  // there is an entry in key and value
	last       []byte                                // the key before, to check the order
	read       int                                   // calls of next
}

// advance reads the next entry and checks its order.
func (in *input) advance() error {
	in.read++
	var err error
	if in.key, in.value, err = in.next(); err != nil {
		if in.ok = false; err == io.EOF {
			return nil
		}
		return err
	}
	in.ok = true
	if err := in.p.checkKey(in.key); err != nil {
		return fmt.Errorf("entry %d: %w", in.read, err)
	}
	if in.read > 1 && bytes.Compare(in.last, in.key) >= 0 {
		return fmt.Errorf("%w: entry %d: %q after %q", ErrOrder, in.read, in.key, in.last)
	}
	if len(in.value) > MaxValueBytes {
		return fmt.Errorf("%w: entry %d: %q has %d bytes, at most %d", ErrTooLarge, in.read, in.key, len(in.value), MaxValueBytes)
	}
	in.last = append(in.last[:0], in.key...)
	return nil
}

// load fills the present layer with the entries that have a prefix.
func (p *Program) load(in *input, prefix []byte) error {
	root, err := p.read(p.root)
	if err != nil {
		return err
	}
	if root.level != 0 || root.count != 0 || root.dead() {
		return ErrNotEmpty
	}
	b := &builder{p: p, stamp: max(root.stamp, p.floor) + 1}
	for err == nil && in.ok && bytes.HasPrefix(in.key, prefix) {
		err = b.take(in, len(prefix))
	}
	var top *node
	if err == nil {
		top, err = b.finish()
	}
	if err == nil {
		top.stamp = b.stamp
		if err = p.replace(p.root, root.stamp, top); errors.Is(err, errChanged) {
			err = ErrNotEmpty
		}
	}
	if err != nil {
		if !unknown(err) {
			b.undo()
		}
		return err
	}
	p.cache.drop(p.root)
	p.cacheNode(p.root, top)
	return nil
}

// take adds the next entry, or the next layer.
func (b *builder) take(in *input, skip int) error {
	p := b.p
	key := in.key[skip:]
	e := entry{version: b.stamp}
	if p.isLayerKey(key) {
		n := node{class: p.class, wide: p.wide}
		ref, err := p.store.Alloc(n.encode(nil, p.limits.Room), TagLayer, p.limits.Room, false)
		if err != nil {
			return err
		}
		b.layers = append(b.layers, ref)
		e.key, e.value, e.external = bytes.Clone(p.layerKey(key)), layerValue(ref), true
		sub := p.below(ref)
		sub.floor = b.stamp
		if err := sub.load(in, bytes.Clone(in.key[:skip+p.limits.InlineKeyBytes])); err != nil {
			return err
		}
		sub.giveBack()
		return b.add(0, e)
	}
	e.key = bytes.Clone(key)
	if e.external = p.outOfLine(key, in.value); e.external {
		ref, err := p.store.Alloc(in.value, TagValue, 0, true)
		if err != nil {
			return err
		}
		b.made = append(b.made, ref)
		e.value, _ = ref.AppendBinary(nil)
		e.value = binary.AppendUvarint(e.value, uint64(len(in.value)))
	} else {
		e.value = bytes.Clone(in.value)
	}
	if err := b.add(0, e); err != nil {
		return err
	}
	return in.advance()
}

// undo frees all objects that have been made.
func (b *builder) undo() {
	for _, r := range b.layers {
		_ = b.p.below(r).dropHere()
	}
	for _, r := range b.made {
		_ = b.p.store.Free(r)
	}
}

// builder makes the nodes of all levels as entries come in, in rising order.
type builder struct {
	p      *Program
	stamp  uint64      // of all nodes
	levels []*building // from the leaves up
	made   []Ref       // everything allocated, to free it after a failure
	layers []Ref       // roots
}

// building is one level: nodes complete but for their right link, and the one that
// grows. The first of the nodes has its slab already, for its left neighbour to link to.
type building struct {
	nodes []*node // complete, waiting for their slabs
	first Ref     // slab of nodes[0]
	now   *node   // grows
	size  int     // bytes of its entries
}

// add puts an entry into a level, and begins another node where it does not fit.
func (b *builder) add(level int, e entry) error {
	if level == len(b.levels) {
		if level > maxLevel {
			return corrupt("%d levels", level)
		}
		b.levels = append(b.levels, &building{now: b.node(level, nil)})
	}
	l := b.levels[level]
	size := leafBytes(len(e.key), len(e.value), e.external, e.version)
	if level > 0 {
		size = 4 + len(e.key) + len(e.value) + 16
	}
	if n := len(l.now.entries); n > 1 && l.size+size+len(e.key) > b.room() && b.filled(l.now, e) {
		sep := e.key
		if level == 0 {
			sep = bytes.Clone(between(l.now.entries[n-1].key, e.key))
		}
		l.now.high = sep
		b.complete(l, l.now)
		l.now, l.size = b.node(level, sep), 0
		if len(l.nodes) >= loadNodes {
			// The node that grows gets its slab now, so that this one can link to it.
			ref, err := b.alloc(b.node(level, sep))
			if err != nil {
				return err
			}
			if err := b.flush(level, ref); err != nil {
				return err
			}
			l.first = ref
		}
	}
	if len(l.now.entries) == 0 {
		l.size = headBytes + len(l.now.low)
	}
	l.now.entries = append(l.now.entries, e)
	l.size += size
	return nil
}

// room is how many bytes of a node Load fills; see Config.Fill.
func (b *builder) room() int { return b.p.limits.Room * b.p.fill / 100 }

// filled says whether n would have more than room bytes with e, given the prefix that its keys share
// with the key of e.
func (b *builder) filled(n *node, e entry) bool {
	c := *n
	c.entries, c.high = append(n.entries, e), e.key
	return c.size() > b.room()
}

// complete takes a node that gets no more entries. If its upper fence shares a shorter prefix with
// the keys than assumed, the node is larger than planned, and is cut until the parts fit.
func (b *builder) complete(l *building, n *node) {
	if n.size() <= b.p.limits.Room {
		l.nodes = append(l.nodes, n)
		return
	}
	right := n.cut(n.half())
	n.stamp, right.stamp = b.stamp, b.stamp
	b.complete(l, n)
	b.complete(l, right)
}

// node is an empty node of a level that begins at low.
func (b *builder) node(level int, low []byte) *node {
	return &node{level: level, class: b.p.class, wide: b.p.wide, stamp: b.stamp, low: low}
}

// alloc allocates a node; an inner one that has no entries yet gets them by flush.
func (b *builder) alloc(n *node) (Ref, error) {
	if n.level > 0 && len(n.entries) == 0 {
		n.entries = []entry{{key: n.low, child: b.p.root}}
	}
	ref, err := b.p.alloc(n)
	if err == nil {
		b.made = append(b.made, ref)
	}
	return ref, err
}

// flush writes the complete nodes of a level, the last first, and tells their
// parents, the first first. right is what follows them.
func (b *builder) flush(level int, right Ref) error {
	l := b.levels[level]
	refs := make([]Ref, len(l.nodes))
	for i, n := range slices.Backward(l.nodes) {
		n.right = right
		var err error
		if i > 0 || l.first.IsZero() {
			refs[i], err = b.alloc(n)
		} else {
			refs[i] = l.first
			n.stamp++
			err = b.p.replace(l.first, b.stamp, n)
		}
		if err != nil {
			return err
		}
		right = refs[i]
	}
	nodes := l.nodes
	l.nodes = nil
	for i, n := range nodes {
		if err := b.add(level+1, entry{key: n.low, child: refs[i]}); err != nil {
			return err
		}
	}
	return nil
}

// finish completes all levels and returns the payload of the root.
func (b *builder) finish() (*node, error) {
	if len(b.levels) == 0 {
		return b.node(0, nil), nil
	}
	for level := 0; ; level++ {
		l := b.levels[level]
		if len(l.nodes) == 0 && l.first.IsZero() && level == len(b.levels)-1 && l.now.size() <= b.p.limits.Room {
			return l.now, nil
		}
		b.complete(l, l.now)
		if err := b.flush(level, Ref{}); err != nil {
			return nil, err
		}
	}
}

// Drop frees every object of the tree. Concurrent operations fail with ErrNoTree at some point; objects
// that they add are orphans.
func (p *Program) Drop() error {
	p.begin()
	return p.dropHere()
}

// dropHere frees the present layer and those below.
func (p *Program) dropHere() error {
	defer p.giveBack()
	var firsts []Ref
	pg, err := p.read(p.root)
	for err == nil && pg.level > 0 {
		first, _ := pg.child(0)
		firsts = append(firsts, first)
		pg, err = p.read(first)
	}
	if freed(err) {
		return ErrNoTree
	} else if err != nil {
		return err
	}
	root, err := p.read(p.root)
	if err == nil && root.level == 0 {
		err = p.freeValues(root)
	}
	if err == nil {
		err = p.store.Free(p.root)
	}
	p.cache.drop(p.root)
	if err != nil {
		return err
	}
	for _, ref := range firsts {
		for !ref.IsZero() {
			p.giveBack()
			pg, err := p.read(ref)
			if freed(err) {
				break
			}
			if err == nil {
				err = p.freeValues(pg)
			}
			if err == nil {
				err = p.store.Free(ref)
			}
			if err != nil && !freed(err) {
				return err
			}
			p.cache.drop(ref)
			ref = pg.right
		}
	}
	return nil
}

// freeValues frees the external values and the layers of a leaf.
func (p *Program) freeValues(pg *page) error {
	if pg.level > 0 {
		return nil
	}
	if err := pg.valid(); err != nil {
		return err
	}
	for i := range pg.count {
		if e, _ := pg.leaf(i); e.external {
			ref, _ := e.outside()
			if e.layer() {
				if err := p.below(ref).dropHere(); err != nil && !errors.Is(err, ErrNoTree) {
					return err
				}
				continue
			}
			if err := p.store.Free(ref); err != nil && !freed(err) {
				return err
			}
		}
	}
	return nil
}
