package job

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/proto"
)

// manifest lists the objects of the runs of one attempt, from before the next one is written until the job is
// cleaned up: a worker that dies leaves at most the object that it was about to list.
type manifest struct {
	Objects []proto.Ref `json:"objects"`         // in the order in which they were made
	Bytes   uint64      `json:"bytes,omitempty"` // of those of a map part that count against the job's budget
	// Aside are the bytes of a second attempt. They count for second attempts alone: none makes the job fail.
	Aside uint64 `json:"aside,omitempty"`
}

func manifests(id uint64) string { return fmt.Sprintf("runs/%012d/", id) }

// errBudget: the job fails at once; the next attempt would need as much.
var errBudget = errors.New("the job has more records between map and reduce than its budget")

// budgetChecks is how often the bytes of a job are added up, by its attempts together, until its budget is used up: about so many times.
const budgetChecks = 16

// written is what one attempt has written of runs.
type written struct {
	w        *worker
	ctx      context.Context // of the attempt
	key      []byte          // of the manifest
	job      uint64
	budget   uint64 // of the job; 0: these runs do not count against it, and have no bound
	aside    bool   // of a second attempt
	manifest manifest
	over     error // that the budget is used up, whatever the plugin makes of the answer of its emit
}

// written is for one attempt of a part.
func (w *worker) written(ctx context.Context, p *Part, budget uint64) *written {
	r := &written{w: w, ctx: ctx, key: fmt.Appendf(nil, "%s%s/%06d/%d", manifests(p.Job), p.Phase, p.Index, p.Attempt), job: p.Job, budget: budget}
	if p.second {
		r.key, r.aside = fmt.Appendf(nil, "%s%s/%06d/second", manifests(p.Job), p.Phase, p.Index), true
	}
	return r
}

// add lists an object of so many bytes.
func (r *written) add(ref proto.Ref, bytes int) error {
	r.manifest.Objects = append(r.manifest.Objects, ref)
	if r.budget > 0 && r.aside {
		r.manifest.Aside += uint64(bytes)
	} else if r.budget > 0 {
		r.manifest.Bytes += uint64(bytes)
	}
	if err := r.w.store.t.Put(r.ctx, r.key, encode(r.manifest)); err != nil {
		return fmt.Errorf("shuffle: manifest: %w", err)
	}
	// The share of objects after which it looks is the share that they have of a step: so attempts that write a few bytes each do not
	// read each other's manifests every time.
	if step := max(1, r.budget/budgetChecks); r.budget == 0 || rand.Uint64N(step) >= uint64(bytes) {
		return nil
	}
	return r.check()
}

// check adds up what the attempts of all map parts have listed.
func (r *written) check() error {
	sum := uint64(0)
	_, err := list(r.ctx, r.w.store.t, prefixed(manifests(r.job)), func(_ []byte, m *manifest, _ uint64) error {
		if sum += m.Bytes; r.aside {
			sum += m.Aside
		}
		return nil
	})
	if err == nil && sum > r.budget {
		r.over = fmt.Errorf("%w of %d MiB: combine more, or submit it with a larger --shuffle", errBudget, r.budget>>20)
		err = r.over
	}
	return err
}

// release takes the objects, which have been freed, out of the sum. They stay listed: to free them again does nothing.
func (r *written) release(ctx context.Context) {
	if r.manifest.Bytes == 0 && r.manifest.Aside == 0 {
		return
	}
	r.manifest.Bytes, r.manifest.Aside = 0, 0
	_ = r.w.store.t.Put(ctx, r.key, encode(r.manifest)) // else they count until the job has ended
}

// count has the bytes of a second attempt count as those of the part's own one, which it is now.
func (r *written) count(ctx context.Context) error {
	if r.aside = false; r.manifest.Aside == 0 {
		return nil
	}
	r.manifest.Bytes, r.manifest.Aside = r.manifest.Aside, 0
	if err := r.w.store.t.Put(ctx, r.key, encode(r.manifest)); err != nil {
		return fmt.Errorf("shuffle: manifest: %w", err)
	}
	return nil
}

// dropManifests frees what the attempts of an ended job have listed.
// Preconditions: no attempt of the job changes memory any more.
func (w *worker) dropManifests(ctx context.Context, id uint64) error {
	var keys [][]byte
	all, err := list(ctx, w.store.t, prefixed(manifests(id)), func(key []byte, _ *manifest, _ uint64) error {
		keys = append(keys, append([]byte(nil), key...))
		return nil
	})
	if err != nil {
		return err
	}
	for i, m := range all {
		freeRefs(ctx, w.c, m.Objects)
		if err := w.store.t.Delete(ctx, keys[i]); err != nil && !errors.Is(err, btree.ErrNoKey) {
			return err
		}
	}
	return nil
}
