package btree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Layers. A node must hold several entries and two fences, so a key in a node has at
// most InlineKeyBytes. Of a longer one the first so many bytes stand in the tree,
// with a mark behind them that makes the key longer than any other. The entry's value is the Ref of
// another tree of the same kind, a layer, which has the remaining bytes of all keys with that
// beginning. A layer may have layers itself.
//
// A layer is a tree like any other, so the rules for concurrent writers, splits and deaths hold in
// it. Two are added:
//
//  1. The entry is added before the first key, by PutIfAbsent: a client whose entry is not
//     the first one uses the layer of the other. A client that dies in between leaves an
//     empty layer.
//  2. An empty layer is marked dead, for ever; then its entry is removed, then its root is
//     freed. No client writes to a dead root: a writer that finds one helps with the removal
//     and starts again. A reader at a dead root finds no key, which was true when it died.
//
// Versions continue where the last layer for the same key bytes ended: the removal of the
// entry raises the stamp of the leaf above to that of the dead root, and writes in a layer
// get versions above that of its entry.

// errNoLayer: the tree has no layer for the beginning of the key.
var errNoLayer = errors.New("no such layer")

// layerKey is the key of the layer for a long key, in the layer above.
func (p *Program) layerKey(key []byte) []byte {
	p.mark = append(append(p.mark[:0], key[:p.limits.InlineKeyBytes]...), 0)
	return p.mark
}

// isLayerKey says whether a key is that of a layer.
func (p *Program) isLayerKey(key []byte) bool { return len(key) > p.limits.InlineKeyBytes }

// entry is the entry of a key, which may be in a layer.
//
// Linearizes at: the READ of the leaf in the last layer; where a layer is missing or
// dead, at some moment of the call at which it was.
func (p *Program) entry(key []byte) (e leafEntry, found bool, err error) {
	for range maxTries {
		rest, err := key, error(nil)
		if p.isLayerKey(key) {
			rest, err = p.dive(key, false)
		}
		var leaf *page
		if err == nil {
			leaf, err = p.find(probe{key: rest}, 0)
		}
		switch {
		case err == errNoLayer:
			return e, false, nil
		case p.layerGone(err):
			continue // and its entry with it
		case err != nil:
			return e, false, err
		}
		_, e, found, err = leaf.lookup(rest)
		return e, found, err
	}
	return e, false, fmt.Errorf("%w: the layers of %q kept changing", ErrBusy, key)
}

// layerGone says whether an error means that the present layer has been freed.
func (p *Program) layerGone(err error) bool {
	return p.root != p.Shared.root && errors.Is(err, ErrNoTree)
}

// dive goes down to the layer that a key belongs to. rest is what is left of the key there. With
// create it makes missing layers.
func (p *Program) dive(key []byte, create bool) (rest []byte, err error) {
	p.root, p.floor = p.Shared.root, 0
	for p.isLayerKey(key) {
		ref, version, err := p.layer(key, create)
		if err != nil {
			return nil, err
		}
		p.root, p.floor, key = ref, version, key[p.limits.InlineKeyBytes:]
	}
	return key, nil
}

// layer is the layer, below the present one, that has a long key.
func (p *Program) layer(key []byte, create bool) (Ref, uint64, error) {
	mark := p.layerKey(key)
	for range maxTries {
		leaf, err := p.find(probe{key: mark}, 0)
		if err != nil {
			return Ref{}, 0, err
		}
		_, e, found, err := leaf.lookup(mark)
		switch {
		case err != nil:
			return Ref{}, 0, err
		case found && !e.layer():
			return Ref{}, 0, corrupt("%v: a key of %d bytes without a layer", leaf.ref, len(mark))
		case found:
			ref, _ := e.outside()
			return ref, e.version, nil
		case !create:
			return Ref{}, 0, errNoLayer
		}
		n := node{class: p.class, wide: p.wide}
		ref, err := p.store.Alloc(n.encode(nil, p.limits.Room), TagLayer, p.limits.Room, false)
		if err != nil {
			return Ref{}, 0, err
		}
		version, err := p.changeHere(write{key: mark, name: mark, value: layerValue(ref), ext: true, cond: IfAbsent()})
		if err == nil {
			p.stats.layers.Add(1)
			return ref, version, nil
		}
		if !unknown(err) {
			_ = p.store.Free(ref)
		}
		if !errors.Is(err, ErrKeyExists) {
			return Ref{}, 0, err
		}
	}
	return Ref{}, 0, fmt.Errorf("%w: the layers of %q kept changing", ErrBusy, key)
}

// layerValue is the value of a layer's entry: an external value of no length.
func layerValue(ref Ref) []byte {
	b, _ := ref.AppendBinary(make([]byte, 0, externalBytes))
	return binary.AppendUvarint(b, 0)
}

// changeBelow carries out a write in the layer of a long key.
func (p *Program) changeBelow(w write) (version uint64, err error) {
	create := !w.remove && w.cond.kind <= condAbsent
	for range maxTries {
		if w.key, err = p.dive(w.name, create); err == nil {
			version, err = p.changeHere(w)
		}
		switch {
		case err == nil && w.remove && p.w.count == 0:
			_ = p.buryLayers(w.name) // if it fails, the next operation that meets the layer does it
			return version, nil
		case err == errNoLayer:
			return 0, fmt.Errorf("%w: %q", ErrNoKey, w.name)
		case errors.Is(err, errDead), p.layerGone(err):
			if err := p.buryLayers(w.name); err != nil {
				return 0, err
			}
			continue
		}
		return version, err
	}
	return 0, fmt.Errorf("%w: the layers of %q kept changing", ErrBusy, w.name)
}

// buryLayers removes the empty layers of a key, the deepest first.
func (p *Program) buryLayers(key []byte) error {
	type step struct {
		root  Ref
		floor uint64
		key   []byte
	}
	path := []step{{p.Shared.root, 0, key}}
	for {
		at := &path[len(path)-1]
		p.root, p.floor = at.root, at.floor
		if !p.isLayerKey(at.key) {
			break
		}
		ref, version, err := p.layer(at.key, false)
		if err == errNoLayer || p.layerGone(err) {
			break
		} else if err != nil {
			return err
		}
		path = append(path, step{ref, version, at.key[p.limits.InlineKeyBytes:]})
	}
	for n := len(path) - 1; n > 0; n-- {
		at, above := &path[n], &path[n-1]
		p.root, p.floor = at.root, at.floor
		dead, stamp, err := p.endLayer()
		if err != nil || !dead {
			return err
		}
		p.root, p.floor = above.root, max(above.floor, stamp)
		mark := p.layerKey(above.key)
		// The write frees what the entry leads to.
		_, err = p.changeHere(write{key: mark, name: mark, remove: true, cond: Cond{kind: condLayer, layer: at.root}})
		if err != nil && !errors.Is(err, ErrNoKey) && !errors.Is(err, errDead) && !p.layerGone(err) {
			return err
		}
	}
	return nil
}

// endLayer marks the present layer dead if it is empty. stamp is the one of its dead root.
func (p *Program) endLayer() (dead bool, stamp uint64, err error) {
	pg, err := p.read(p.root)
	switch {
	case freed(err):
		return false, 0, nil
	case err != nil:
		return false, 0, err
	case pg.dead():
		return true, pg.stamp, nil
	case pg.level > 0 || pg.count > 0:
		return false, 0, nil
	}
	n := pg.node()
	n.dead, n.stamp = true, n.stamp+1
	switch err := p.replace(p.root, pg.stamp, n); {
	case errors.Is(err, errChanged), freed(err):
		return false, 0, nil
	case err != nil:
		return false, 0, err
	}
	p.cache.drop(p.root)
	return true, n.stamp, nil
}

// below is a program for a layer under the present one, used while the pages of the present one are
// still needed.
func (p *Program) below(root Ref) *Program {
	if p.lower == nil {
		p.lower = NewProgram(p.Shared, p.store)
	}
	p.lower.begin()
	p.lower.root = root
	return p.lower
}

// within is the part of a bound that lies in the layer of a prefix; nil if the
// bound is not in that layer.
func within(bound, prefix []byte) []byte {
	if len(bound) > len(prefix) && bytes.HasPrefix(bound, prefix) {
		return bound[len(prefix):]
	}
	return nil
}

// bounds are those of a range in the present layer: a bound in a layer below becomes one before or
// behind the entry of that layer.
func (p *Program) bounds(r Range) (from, to []byte) {
	from, to = r.From, r.To
	if n := p.limits.InlineKeyBytes; len(from) > n {
		from = append(bytes.Clone(from[:n]), 0)
	}
	if n := p.limits.InlineKeyBytes; len(to) > n {
		to = append(bytes.Clone(to[:n]), 0, 0)
	}
	return from, to
}
