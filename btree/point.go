package btree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Answers of write.apply that send the writer elsewhere. Nothing was changed.
var (
	errMoved  = errors.New("not the leaf of this key")
	errFrozen = errors.New("leaf is frozen")
	errFull   = errors.New("leaf is full")
	errDead   = errors.New("layer has been given up")
	// errOutside: the condition is about a value that is not in the leaf.
	errOutside = errors.New("value to compare is external")
	// errRefused: Write.Edit has refused, with w.refusal.
	errRefused = errors.New("refused")
)

// Cond is what must hold for a write. The zero Cond always holds.
type Cond struct {
	kind    uint8
	version uint64
	value   []byte
	layer   Ref
	mask    byte
}

const (
	condAbsent = iota + 1
	condUnless
	condVersion
	condValue
	condLayer // the entry leads to a layer
)

// IfAbsent: the tree does not have the key.
func IfAbsent() Cond { return Cond{kind: condAbsent} }

// IfVersion: the key has been there since the write that had this version.
func IfVersion(v uint64) Cond { return Cond{kind: condVersion, version: v} }

// Unless: the key has no value, or an external one, or one whose first byte has none of the bits
// of mask. A program that marks short values by such a bit keeps writers that do not read from
// overwriting a marked value, at no cost to them.
func Unless(mask byte) Cond { return Cond{kind: condUnless, mask: mask} }

// IfValue: the key has this value.
func IfValue(b []byte) Cond { return Cond{kind: condValue, value: b} }

// write is the change of one key, as Store.Update runs it on a leaf. It belongs to its Program.
type write struct {
	key    []byte                                                                  // within the layer
	name   []byte                                                                  // the whole key, for errors
	floor  uint64                                                                  // the new version is above it; see layer.go
	cond   Cond                                                                    // must hold
	remove bool                                                                    // the key is removed
	value  []byte                                                                  // or Ref and length
	ext    bool                                                                    // value is a Ref and a length
	edit   func(old []byte, version uint64) (value []byte, remove bool, err error) // makes value and remove
	most   int                                                                     // bytes of the largest value that edit may make
	room   int                                                                     // bytes that entries may take in the leaf
	ours   bool                                                                    // the payload is valid: it comes from an earlier write of the group, or see whole
	enc    []byte                                                                  // scratch: the new entry
	out    []byte                                                                  // scratch: the new leaf

	// Of the last run.
	version uint64
	base    uint64 // version of the entry that the write replaces; 0: none
	old     Ref    // external value that the write replaces
	left    int    // bytes in the leaf afterwards, without waste
	count   int    // entries
	refusal error  // of edit
}

// apply is the callback of Update: it makes the new leaf from the old one, or says why not. It
// may run more than once.
//
// Linearizes at: the commit of Update; where it answers ErrNoKey, ErrKeyExists or ErrConflict, at
// the READ under the reservation.
func (w *write) apply(old []byte) ([]byte, error) {
	v, err := parse(old)
	if err == nil && !w.ours {
		err = v.valid()
	}
	switch {
	case err != nil:
		return nil, err
	case v.level != 0 || v.place(probe{key: w.key}) != 0:
		return nil, errMoved
	case v.frozen():
		return nil, errFrozen
	case v.dead():
		return nil, errDead
	}
	i, e, found, err := v.lookup(w.key)
	if err == nil && w.edit != nil {
		err = w.ask(&e, found)
	} else if err == nil {
		err = w.check(&e, found)
	}
	if err != nil {
		return nil, err
	}
	j := i
	w.old, w.base = Ref{}, 0
	if found {
		j++
		w.base = e.version
		if e.external {
			w.old, _ = e.outside()
		}
	}
	w.version = max(v.stamp, w.floor) + 1
	w.enc = w.enc[:0]
	var flags uint8
	w.count = v.count - (j - i)
	if !w.remove {
		w.enc = appendLeaf(w.enc, w.key[v.prefix:], w.value, w.ext, w.version)
		w.count++
		if w.ext && w.value[len(w.value)-1] == 0 {
			flags = flagLayers
		}
	}
	w.out, w.left = v.splice(w.out, change{i, j, w.enc, w.version, flags}, w.room)
	if w.left > w.room {
		return nil, errFull
	}
	return w.out, nil
}

// ask calls edit, which computes the value or the removal.
func (w *write) ask(e *leafEntry, found bool) error {
	var old []byte
	var version uint64
	switch {
	case found && e.external:
		return errOutside
	case found:
		old, version = e.value, e.version
	}
	w.value, w.remove, w.refusal = w.edit(old, version)
	switch {
	case w.refusal != nil:
		return errRefused
	case w.remove && !found:
		return fmt.Errorf("%w: %q", ErrNoKey, w.name)
	case !w.remove && len(w.value) > w.most:
		return errOutside
	}
	return nil
}

// check says whether the condition holds for the entry that the leaf has.
func (w *write) check(e *leafEntry, found bool) error {
	switch {
	case w.cond.kind == condAbsent && found:
		return fmt.Errorf("%w: %q", ErrKeyExists, w.name)
	case w.remove && !found, w.cond.kind >= condVersion && !found:
		return fmt.Errorf("%w: %q", ErrNoKey, w.name)
	case w.cond.kind == condUnless && found && !e.external && len(e.value) > 0 && e.value[0]&w.cond.mask != 0:
		return fmt.Errorf("%w: %q is marked", ErrConflict, w.name)
	case w.cond.kind == condVersion && e.version != w.cond.version:
		return fmt.Errorf("%w: %q is at version %d, not %d", ErrConflict, w.name, e.version, w.cond.version)
	case w.cond.kind == condLayer:
		if ref, _ := e.outside(); ref != w.cond.layer {
			return errDead
		}
	case w.cond.kind == condValue && e.external:
		if _, n := e.outside(); n != len(w.cond.value) {
			return fmt.Errorf("%w: %q has another value", ErrConflict, w.name)
		}
		return errOutside
	case w.cond.kind == condValue && !bytes.Equal(e.value, w.cond.value):
		return fmt.Errorf("%w: %q has another value", ErrConflict, w.name)
	}
	return nil
}

// Get appends the key's value to dst. With the inner nodes cached it takes one round, two for an
// external value, and one more for each layer. version is that of the write that put the value.
//
// Linearizes at: the READ of the leaf.
//
// Errors: ErrNoKey, ErrBadKey, ErrNoTree, ErrBusy, and those of the Store.
func (p *Program) Get(key, dst []byte) (value []byte, version uint64, err error) {
	if err := p.checkKey(key); err != nil {
		return dst, 0, err
	}
	p.begin()
	defer p.end()
	for try := range maxTries {
		var e leafEntry
		var found, ok bool
		if try == 0 && !p.isLayerKey(key) {
			value, e, found, ok, err = p.look(key, dst)
			if ok && found && !e.external {
				return value, e.version, err
			}
		}
		if !ok {
			e, found, err = p.entry(key)
		}
		switch {
		case err != nil:
			return dst, 0, err
		case !found:
			return dst, 0, ErrNoKey
		case !e.external:
			return append(dst, e.value...), e.version, nil
		}
		out, err := p.outside(&e, dst)
		if err == nil || !freed(err) {
			return out, e.version, err
		}
		// Freed since: the leaf has the new value.
		p.giveBack()
	}
	return dst, 0, fmt.Errorf("%w: %q kept changing", ErrBusy, key)
}

// outside reads an external value.
func (p *Program) outside(e *leafEntry, dst []byte) ([]byte, error) {
	ref, n := e.outside()
	out, err := p.store.Read(ref, dst)
	if err == nil && len(out)-len(dst) != n {
		return dst, corrupt("value %v has %d bytes, its leaf says %d", ref, len(out)-len(dst), n)
	}
	return out, err
}

// Put sets the key's value if the condition holds. With the inner nodes cached it takes two
// rounds, three with backups; one more (two) for a value that does not fit the leaf. version is
// that of this write.
//
// Linearizes at: the commit of the leaf; see write.apply.
func (p *Program) Put(key, value []byte, cond Cond) (version uint64, err error) {
	if err := p.checkKey(key); err != nil {
		return 0, err
	}
	if len(value) > MaxValueBytes {
		return 0, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(value), MaxValueBytes)
	}
	p.store.Begin()
	if !p.outOfLine(key, value) {
		return p.change(write{key: key, value: value, cond: cond})
	}
	ref, err := p.store.Alloc(value, TagValue, 0, true)
	if err != nil {
		return 0, err
	}
	b, _ := ref.AppendBinary(make([]byte, 0, externalBytes+8))
	b = binary.AppendUvarint(b, uint64(len(value)))
	version, err = p.change(write{key: key, value: b, ext: true, cond: cond})
	if err != nil && !unknown(err) {
		_ = p.store.Free(ref) // after an error it is an orphan, which Collect finds
	}
	return version, err
}

// Base is the version of what the last successful Put has replaced; 0: the key was absent.
func (p *Program) Base() uint64 { return p.w.base }

// outOfLine says whether a value needs an object of its own.
func (p *Program) outOfLine(key, value []byte) bool { return len(value) > p.inlineBytes(key) }

// inlineBytes is the largest value of a key that stands in its leaf.
func (p *Program) inlineBytes(key []byte) int {
	for len(key) > p.limits.InlineKeyBytes {
		key = key[p.limits.InlineKeyBytes:]
	}
	return min(MaxInlineBytes, p.limits.entry-entryHead-len(key))
}

// Delete removes the key if the condition holds; ErrNoKey if it is not there.
func (p *Program) Delete(key []byte, cond Cond) error {
	if err := p.checkKey(key); err != nil {
		return err
	}
	p.store.Begin()
	_, err := p.change(write{key: key, remove: true, cond: cond})
	return err
}

// change carries out a write.
func (p *Program) change(w write) (version uint64, err error) {
	p.begin()
	defer p.end()
	if w.name = w.key; len(w.key) > p.limits.InlineKeyBytes {
		return p.changeBelow(w)
	}
	return p.changeHere(w)
}

// changeHere carries out a write in the present layer.
func (p *Program) changeHere(w write) (version uint64, err error) {
	w.enc, w.out, w.room, w.floor = p.w.enc, p.w.out, p.limits.Room, p.floor
	p.w = w
	ref, err := p.leafOf(w.key)
	if full := p.groups.full; err == nil && !full.IsZero() {
		// A group has just found that there is no room.
		p.groups.full = Ref{}
		if full == ref {
			if err = p.split(ref, w.key); err == nil {
				ref, err = p.leafOf(w.key)
			}
		}
	}
	if err != nil {
		return 0, err
	}
	for range maxTries {
		err := p.store.Update(ref, p.apply)
		switch {
		case err == nil:
			if !p.w.old.IsZero() {
				_ = p.store.Free(p.w.old)
			}
			if p.w.remove && p.underFull(p.w.left) {
				p.mergeAround(w.key, 0)
			}
			return p.w.version, nil
		case errors.Is(err, errFrozen):
			err = p.settle(ref)
		case errors.Is(err, errFull):
			if err = p.split(ref, w.key); err == nil {
				if ref, err = p.leafOf(w.key); err == nil {
					continue // which half the cache knows by now
				}
			}
		case errors.Is(err, errMoved), freed(err):
			err = nil
		case errors.Is(err, errOutside):
			if err = p.compareOutside(w.cond.value); err == nil {
				continue
			}
		}
		if err != nil {
			return 0, err
		}
		leaf, err := p.find(probe{key: w.key}, 0)
		if err != nil {
			return 0, err
		}
		ref = leaf.ref
	}
	return 0, fmt.Errorf("%w: %q kept moving", ErrBusy, w.name)
}

// compareOutside turns a condition on an external value into one on its version.
func (p *Program) compareOutside(want []byte) error {
	for range maxTries {
		leaf, err := p.find(probe{key: p.w.key}, 0)
		if err != nil {
			return err
		}
		_, e, found, err := leaf.lookup(p.w.key)
		if err != nil || !found || !e.external {
			return err // apply tells
		}
		got, err := p.outside(&e, nil)
		if freed(err) {
			continue
		}
		if err == nil && !bytes.Equal(got, want) {
			err = fmt.Errorf("%w: %q has another value", ErrConflict, p.w.name)
		}
		if err == nil {
			p.w.cond = Cond{kind: condVersion, version: e.version}
		}
		return err
	}
	return fmt.Errorf("%w: %q kept changing", ErrBusy, p.w.name)
}

// leafOf is the leaf that should have a key. It does not read the leaf: the Update that follows
// checks it. A root that is not cached is taken for a leaf.
func (p *Program) leafOf(key []byte) (Ref, error) {
	if ref, ok := p.quick(key, 0); ok {
		return ref, nil
	}
	ref, pr := p.root, probe{key: key}
	for steps := 0; steps < maxLevel; steps++ {
		pg := p.cache.load(ref)
		if pg == nil && ref == p.root {
			return ref, nil
		}
		if pg == nil {
			var err error
			if pg, err = p.read(ref); freed(err) {
				break
			} else if err != nil {
				return ref, err
			}
			p.cache.miss.Add(1)
		} else {
			p.cache.hits.Add(1)
		}
		if pg.level == 0 || pg.place(pr) != 0 {
			break
		}
		i, child, ok := pg.childOf(pr)
		if !ok {
			return ref, corrupt("%v: entry %d", ref, i)
		}
		if ref = child; pg.level == 1 {
			return ref, nil
		}
	}
	leaf, err := p.find(pr, 0)
	if err != nil {
		return ref, err
	}
	return leaf.ref, nil
}
