package btree

import (
	"bytes"
	"errors"
	"slices"
)

// GetMany calls fn once for each key, in any order; slices die with the call, fn
// does not call the tree. Two rounds when warm, one if all values are inline: each
// leaf is read once.
func (p *Program) GetMany(keys [][]byte, fn func(i int, value []byte, version uint64, err error)) error {
	p.begin()
	defer p.end()
	var refs []Ref
	at := map[Ref]int{}            // of refs
	first := []int{}               // key of a leaf, -1 for none
	next := make([]int, len(keys)) // another key of the same leaf
	var outside, alone []int       // keys with external values; keys to look for one by one
	values := make([]leafEntry, len(keys))
	for i, k := range keys {
		if err := p.checkKey(k); err != nil {
			fn(i, nil, 0, err)
			continue
		}
		if len(k) > p.limits.InlineKeyBytes {
			alone = append(alone, i)
			continue
		}
		ref, err := p.leafOf(k)
		p.giveBack()
		if err != nil {
			return err
		}
		j, ok := at[ref]
		if !ok {
			j = len(refs)
			at[ref], refs, first = j, append(refs, ref), append(first, -1)
		}
		next[i], first[j] = first[j], i
	}
	err := p.store.ReadMany(refs, func(j int, b []byte, err error) {
		var v view
		if err == nil {
			v, err = parse(b)
		}
		for i := first[j]; i >= 0; i = next[i] {
			if err != nil || v.level != 0 || v.frozen() || v.place(probe{key: keys[i]}) != 0 {
				alone = append(alone, i)
				continue
			}
			_, e, found, err := v.lookup(keys[i])
			switch {
			case err != nil:
				fn(i, nil, 0, err)
			case !found:
				fn(i, nil, 0, ErrNoKey)
			case e.external:
				e.value, e.suffix = bytes.Clone(e.value), nil
				values[i], outside = e, append(outside, i)
			default:
				fn(i, e.value, e.version, nil)
			}
		}
	})
	if err != nil {
		return err
	}
	if len(outside) > 0 {
		refs = refs[:0]
		for _, i := range outside {
			ref, _ := values[i].outside()
			refs = append(refs, ref)
		}
		err = p.store.ReadMany(refs, func(j int, b []byte, err error) {
			i := outside[j]
			if freed(err) {
				alone = append(alone, i)
				return
			}
			if _, n := values[i].outside(); err == nil && n != len(b) {
				err = corrupt("value %v has %d bytes, its leaf says %d", refs[j], len(b), n)
			}
			fn(i, b, values[i].version, err)
		})
		if err != nil {
			return err
		}
	}
	for _, i := range alone {
		v, version, err := p.Get(keys[i], nil)
		fn(i, v, version, err)
	}
	return nil
}

// PutMany sets keys, each by itself: errs[i] is the answer for keys[i]. Keys of one
// leaf share an Update. Of equal keys the last one stays.
func (p *Program) PutMany(keys, values [][]byte) (errs []error) {
	errs = make([]error, len(keys))
	if len(values) != len(keys) {
		for i := range errs {
			errs[i] = errors.New("btree: as many values as keys, please")
		}
		return errs
	}
	order := make([]int, len(keys))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return bytes.Compare(keys[a], keys[b]) })
	for len(order) > 0 {
		n := p.putSome(keys, values, order, errs)
		order = order[n:]
	}
	return errs
}

// putSome puts as many of the first keys as go into one leaf, at least one.
func (p *Program) putSome(keys, values [][]byte, order []int, errs []error) int {
	i := order[0]
	small := func(i int) bool {
		return p.checkKey(keys[i]) == nil && len(keys[i]) <= p.limits.InlineKeyBytes && !p.outOfLine(keys[i], values[i])
	}
	alone := func() int {
		_, errs[i] = p.Put(keys[i], values[i], Cond{})
		return 1
	}
	if len(order) == 1 || !small(i) || !small(order[1]) {
		return alone()
	}
	p.begin()
	leaf, err := p.leafOf(keys[i])
	p.end()
	if err != nil {
		errs[i] = err
		return 1
	}
	if p.batch == nil {
		p.batch = make([]Write, MaxGroup)
	}
	n := 0
	p.WriteGroup(leaf, func() *Write {
		// The keys are sorted: behind one that does not fit the leaf none does.
		if n == MaxGroup || n == len(order) || n > 0 && p.batch[n-1].Alone || !small(order[n]) {
			return nil
		}
		p.batch[n] = Write{Key: keys[order[n]], Value: values[order[n]]}
		n++
		return &p.batch[n-1]
	})
	if n > 0 && p.batch[n-1].Alone {
		for n--; n > 0 && p.batch[n-1].Alone; n-- {
		}
	}
	for k := range n {
		errs[order[k]] = p.batch[k].Err
	}
	// The callback ran again, on a leaf that had changed: what did not go in then goes
	// in now, unless a write of the same key behind it went in.
	for k := n - 1; k >= 0; k-- {
		switch i := order[k]; {
		case !p.batch[k].Alone:
		case k+1 < n && bytes.Equal(keys[i], keys[order[k+1]]):
			errs[i] = errs[order[k+1]]
		default:
			_, errs[i] = p.Put(keys[i], values[i], Cond{})
		}
	}
	clear(p.batch)
	if n == 0 {
		return alone()
	}
	return n
}
