package beamio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/core/sdf"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/register"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

func init() {
	register.DoFn4x1[context.Context, *sdf.LockRTracker, []byte, func([]byte, []byte), error](&readFn{})
	register.Emitter2[[]byte, []byte]()
	beam.RegisterType(reflect.TypeFor[span]())
}

// Source is what a pipeline reads of a tree.
type Source struct {
	Cluster
	Tree     string // name
	From, To []byte // From <= key < To; none: no bound
	// Parts is how many ranges the tree is cut into at first, at most; 0 means 64. A small tree has fewer.
	Parts int
}

const defaultParts = 64

// Read returns the entries of a tree, a PCollection<KV<[]byte, []byte>>.
func Read(s beam.Scope, from Source) beam.PCollection {
	s = s.Scope("quarry.Read " + from.Tree)
	if from.Tree == "" || from.Parts < 0 || from.Parts > kv.MaxSplits {
		panic(fmt.Sprintf("quarry: tree %q in %d parts: want a name, and at most %d parts", from.Tree, from.Parts, kv.MaxSplits))
	}
	if from.Parts == 0 {
		from.Parts = defaultParts
	}
	return beam.ParDo(s, &readFn{Source: from}, beam.Impulse(s))
}

// readFn reads spans of a tree.
type readFn struct {
	Source Source

	c       *client.Client
	release func()
}

// Setup connects the worker.
func (f *readFn) Setup(ctx context.Context) (err error) {
	f.c, f.release, err = acquire(ctx, f.Source.Cluster)
	return err
}

// Teardown ends the use of the connection.
func (f *readFn) Teardown() {
	if f.release != nil {
		f.release()
	}
}

// CreateInitialRestriction is all of the source.
func (f *readFn) CreateInitialRestriction(_ []byte) span {
	return span{From: f.Source.From, To: f.Source.To}
}

// SplitRestriction cuts it as kv.Tree.Splits does. Runners call it without Setup.
func (f *readFn) SplitRestriction(ctx context.Context, _ []byte, all span) (out []span, err error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	c, release, err := acquire(ctx, f.Source.Cluster)
	if err != nil {
		return nil, err
	}
	defer release()
	t, err := kv.Open(ctx, c, f.Source.Tree, btree.Config{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	splits, err := t.Splits(ctx, keys(all), f.Source.Parts)
	for _, s := range splits {
		out = append(out, span{From: s.From, To: s.To, Bytes: s.Bytes})
	}
	return out, err
}

// keys are those of a span.
func keys(s span) btree.Range {
	r := btree.Range{From: s.From}
	if len(s.To) > 0 {
		r.To = s.To
	}
	return r
}

// RestrictionSize is in bytes.
func (f *readFn) RestrictionSize(_ []byte, s span) float64 {
	if s.None {
		return 0
	}
	return float64(max(1, s.Bytes))
}

// CreateTracker begins a span.
func (f *readFn) CreateTracker(s span) *sdf.LockRTracker { return sdf.NewLockRTracker(newTracker(s)) }

// ProcessElement reads a span, as far as it is not split off.
func (f *readFn) ProcessElement(ctx context.Context, rt *sdf.LockRTracker, _ []byte, emit func(key, value []byte)) error {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	s := rt.GetRestriction().(span)
	if s.None {
		return nil
	}
	t, err := kv.Open(ctx, f.c, f.Source.Tree, btree.Config{ReadOnly: true})
	if err != nil {
		return err
	}
	whole := true
	err = t.Scan(ctx, keys(s), func(key, value []byte, _ uint64) bool {
		key = append([]byte{}, key...)
		if whole = rt.TryClaim(key); whole {
			emit(key, bytes.Clone(value))
		}
		return whole
	})
	if err == nil && whole {
		rt.TryClaim([]byte(nil))
	}
	return errors.Join(err, rt.GetError())
}
