package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
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

// planTree gives each part about as many bytes as the others.
func planTree(ctx context.Context, c *client.Client, j *Job) ([]*Part, error) {
	t, err := kv.Open(ctx, c, j.Spec.Input.Tree, btree.Config{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	splits, err := t.Splits(ctx, j.Spec.Input.keys(), j.Spec.MapParts)
	if err != nil {
		return nil, err
	}
	var parts []*Part
	for _, s := range splits {
		parts = append(parts, &Part{From: s.From, To: s.To, Node: s.Node})
	}
	return parts, nil
}

const (
	// partsEach worker: a part that takes long leaves others to the other workers.
	partsEach = 4
	// partBytes bounds a part of a job that does not say how many parts it has: what an attempt has done when its worker dies is done again.
	partBytes = 64 << 20
)

// mapParts is the number of parts of a job that does not say how many, with input of so many bytes.
func mapParts(workers int, bytes int64) int {
	return int(min(MaxParts, max(partsEach, partsEach*int64(workers), (bytes+partBytes-1)/partBytes)))
}

// inputSize estimates the input of a job, 0 if that is not a tree.
func inputSize(ctx context.Context, t *kv.Tree, s Source) (bytes int64, err error) {
	if t == nil {
		return 0, nil
	}
	splits, err := t.Splits(ctx, s.keys(), partsEach)
	for _, s := range splits {
		bytes += s.Bytes
	}
	return bytes, err
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

// fewObjects of a part are in its record, which each beat writes. More are in a record of their own.
const fewObjects = 16

// inputs is what the keys of those records begin with.
func inputs(id uint64) string { return fmt.Sprintf("input/%012d/", id) }

// inputKey is where the objects of a map part are.
func inputKey(p *Part) []byte { return fmt.Appendf(nil, "%s%06d", inputs(p.Job), p.Index) }

// apart is in the place of those objects: a worker of an earlier version, which reads no other record, fails with its name.
var apart = Object{
	Name: "its objects are in a record that this worker does not read: replace the worker",
	Ref:  proto.Ref{Addr: proto.MakeAddr(math.MaxUint32, proto.BlockBytes), Incarnation: proto.MakeIncarnation(0, 1)}, // a region that no cluster has
}

// setApart puts the objects of new map parts into records of their own, if all workers read them there.
func (w *worker) setApart(ctx context.Context, parts []*Part) error {
	if w.staff.Load().format < 1 {
		return nil
	}
	for _, p := range parts {
		if len(p.Objects) <= fewObjects {
			continue
		}
		if err := w.store.t.PutIfAbsent(ctx, inputKey(p), encode(p.Objects)); err != nil && !errors.Is(err, btree.ErrKeyExists) {
			return err
		}
		p.Objects, p.Apart = []Object{apart}, true
	}
	return nil
}

// objects are those of a map part.
func (s *Store) objects(ctx context.Context, p *Part) (all []Object, err error) {
	if !p.Apart {
		return p.Objects, nil
	}
	b, err := s.t.Get(ctx, inputKey(p), nil)
	if err == nil {
		err = json.Unmarshal(b, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("%v: its objects: %w", p, err)
	}
	return all, nil
}

// input calls f with the records of a map part.
func (e *env) input(p *Part, f func(key, value []byte) error) error {
	ctx, c, j := e.ctx, e.c, e.job
	if j.Spec.Input.Objects != "" {
		all, err := e.w.store.objects(ctx, p)
		if err != nil {
			return err
		}
		r := e.reads(fromObjects)
		defer r.flush()
		var buf []byte
		for _, o := range all {
			if err := ctx.Err(); err != nil {
				return err
			}
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
