package job

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// plan cuts a job's input into map parts, each with the node that holds most of it.
func plan(ctx context.Context, c *client.Client, j *Job) ([]*Part, error) {
	var parts []*Part
	var err error
	if j.Spec.Input.Objects != "" {
		parts, err = planObjects(ctx, c, j)
	} else {
		parts, err = planTree(ctx, c, j)
	}
	if err != nil {
		return nil, fmt.Errorf("input %v: %w", j.Spec.Input, err)
	}
	for i, p := range parts {
		p.Job, p.Phase, p.Index, p.State = j.ID, phaseMap, i, Pending
	}
	return parts, nil
}

// planTree gives each part about as many leaves as the others.
func planTree(ctx context.Context, c *client.Client, j *Job) ([]*Part, error) {
	t, err := kv.Open(ctx, c, j.Spec.Input.Tree, btree.Config{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	type leaf struct {
		low  []byte
		node uint32
	}
	var leaves []leaf
	r := j.Spec.Input.keys()
	err = t.Leaves(ctx, r, func(low []byte, ref btree.Ref) bool {
		node, _ := c.Where(ref)
		leaves = append(leaves, leaf{slices.Clone(low), node})
		return true
	})
	if err != nil {
		return nil, err
	}
	n := min(len(leaves), j.Spec.MapParts)
	var parts []*Part
	for i := range n {
		lo, hi := i*len(leaves)/n, (i+1)*len(leaves)/n
		p := &Part{From: r.From, To: r.To}
		if i > 0 {
			p.From = parts[i-1].To
		}
		if i < n-1 {
			p.To = leaves[hi].low
		}
		share := map[uint32]int{}
		for _, l := range leaves[lo:hi] {
			if share[l.node]++; share[l.node] > share[p.Node] {
				p.Node = l.node
			}
		}
		if p.To != nil && bytes.Compare(p.From, p.To) >= 0 {
			return nil, fmt.Errorf("leaves of tree %q are out of order", t.Name())
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// planObjects gives each part objects of one node.
func planObjects(ctx context.Context, c *client.Client, j *Job) ([]*Part, error) {
	byNode := map[uint32][]Object{}
	total := 0
	err := c.Names().List(ctx, j.Spec.Input.Objects, "object", func(n client.Name) error {
		node, _ := c.Where(n.Ref)
		byNode[node] = append(byNode[node], Object{n.Name, n.Ref})
		total++
		return nil
	})
	if err != nil {
		return nil, err
	}
	each := max(1, (total+j.Spec.MapParts-1)/j.Spec.MapParts)
	var parts []*Part
	for node, objects := range byNode {
		for some := range slices.Chunk(objects, each) {
			parts = append(parts, &Part{Node: node, Objects: some})
		}
	}
	slices.SortFunc(parts, func(a, b *Part) int { return strings.Compare(a.Objects[0].Name, b.Objects[0].Name) })
	if len(parts) > MaxParts {
		return nil, fmt.Errorf("%d parts, at most %d", len(parts), MaxParts)
	}
	return parts, nil
}

// input calls f with the records of a map part.
func (e *env) input(p *Part, f func(key, value []byte) error) error {
	ctx, c, j := e.ctx, e.c, e.job
	if j.Spec.Input.Objects != "" {
		r := e.reads(fromObjects)
		defer r.flush()
		var buf []byte
		for _, o := range p.Objects {
			if err := ctx.Err(); err != nil {
				return err
			}
			var err error
			if buf, err = c.Read(ctx, o.Ref, buf[:0]); errors.Is(err, client.ErrFreed) {
				continue // freed since the plan was made
			} else if err != nil {
				return fmt.Errorf("%q: %w", o.Name, err)
			}
			r.note(len(buf))
			r.to.objects.Add(1)
			if err := f([]byte(o.Name), buf); err != nil {
				return err
			}
		}
		return nil
	}
	t, err := e.w.trees.tree(ctx, j.opened(j.Spec.Input.Tree, false))
	if err != nil {
		return err
	}
	r := e.reads(fromTree)
	defer r.flush()
	var failed error
	now := time.Now()
	err = t.Scan(ctx, btree.Range{From: p.From, To: p.To}, func(key, value []byte, _ uint64) bool {
		if failed = ctx.Err(); failed != nil {
			return false
		}
		var ok bool
		r.note(len(key) + len(value))
		if key, value, ok, failed = j.Spec.Input.record(key, value, now); ok && failed == nil {
			failed = f(slices.Clip(key), slices.Clip(value)) // a plugin may append
		}
		return failed == nil
	})
	return errors.Join(failed, err)
}
