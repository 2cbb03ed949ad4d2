package job

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/proto"
)

// manifest lists the objects of the runs of one attempt, from before the next one is written until the job is
// cleaned up: a worker that dies leaves at most the object that it was about to list.
type manifest struct {
	Objects []proto.Ref `json:"objects"` // in the order in which they were made
}

// manifests is the prefix of a job's manifests.
func manifests(id uint64) string { return fmt.Sprintf("runs/%012d/", id) }

// manifest is for one attempt of a part: the function adds an object.
func (w *worker) manifest(ctx context.Context, p *Part) func(proto.Ref) error {
	key := fmt.Appendf(nil, "%s%s/%06d/%d", manifests(p.Job), p.Phase, p.Index, p.Attempt)
	var m manifest
	return func(ref proto.Ref) error {
		m.Objects = append(m.Objects, ref)
		if err := w.store.t.Put(ctx, key, encode(m)); err != nil {
			return fmt.Errorf("shuffle: manifest: %w", err)
		}
		return nil
	}
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
