package beamio

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/register"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

func init() {
	register.DoFn3x1[context.Context, []byte, []byte, error](&writeFn{})
}

// Sink is where a pipeline puts entries.
type Sink struct {
	Cluster
	Tree string // name; it is made if it is not there
}

// Write puts the entries of a PCollection<KV<[]byte, []byte>>. Of several entries with one key any may be the last.
func Write(s beam.Scope, to Sink, entries beam.PCollection) {
	s = s.Scope("quarry.Write " + to.Tree)
	if to.Tree == "" {
		panic("quarry: Sink names no tree")
	}
	beam.ParDo0(s, &writeFn{Sink: to}, entries)
}

// Entries are put together, up to these numbers.
const (
	putEntries = 256
	putBytes   = 1 << 20
)

// writeFn puts entries, those of a bundle before its end.
type writeFn struct {
	Sink Sink

	t            *kv.Tree
	release      func()
	keys, values [][]byte // not put yet
	size         int      // their bytes
}

// Setup connects the worker.
func (f *writeFn) Setup(ctx context.Context) error {
	c, release, err := acquire(ctx, f.Sink.Cluster)
	if err != nil {
		return err
	}
	f.release = release
	f.t, err = kv.OpenOrCreate(ctx, c, f.Sink.Tree, btree.Config{})
	return err
}

// Teardown ends the use of the connection.
func (f *writeFn) Teardown() {
	if f.release != nil {
		f.release()
	}
}

// StartBundle forgets what a bundle that failed has left.
func (f *writeFn) StartBundle(context.Context) { f.keys, f.values, f.size = nil, nil, 0 }

// ProcessElement takes an entry.
func (f *writeFn) ProcessElement(ctx context.Context, key, value []byte) error {
	f.keys, f.values = append(f.keys, bytes.Clone(key)), append(f.values, bytes.Clone(value))
	if f.size += len(key) + len(value); len(f.keys) < putEntries && f.size < putBytes {
		return nil
	}
	return f.flush(ctx)
}

// FinishBundle puts the rest: the runner takes the bundle for done behind it.
func (f *writeFn) FinishBundle(ctx context.Context) error { return f.flush(ctx) }

// flush puts what is there. A put of unknown outcome is repeated.
func (f *writeFn) flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	for i, err := range f.t.PutMany(ctx, f.keys, f.values) {
		if errors.Is(err, client.ErrUnknown) {
			err = f.t.Put(ctx, f.keys[i], f.values[i])
		}
		if err != nil {
			return fmt.Errorf("tree %q: %w", f.Sink.Tree, err)
		}
	}
	f.keys, f.values, f.size = nil, nil, 0
	return nil
}
