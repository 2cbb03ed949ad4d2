package chaos

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// treeName is the tree of a run: its keys are objects of the history, under names with
// this prefix, and the gateways serve it.
const (
	treeName   = "chaos"
	keyPrefix  = "key:"
	sharedKeys = 8
)

func keyObject(i int) string { return fmt.Sprint(keyPrefix, i) }

// treeKey is a key's name in the tree, outside the records of gateways.
func treeKey(object string) []byte { return []byte("\xff" + object) }

// makeTree makes the tree and gives each shared key its first value.
func (w *worker) makeTree(ctx context.Context) error {
	err := w.insist(ctx, func(ctx context.Context) (err error) {
		if w.tree, err = kv.Create(ctx, w.c, treeName, btree.Config{}); errors.Is(err, client.ErrNameExists) {
			w.tree, err = kv.Open(ctx, w.c, treeName, btree.Config{})
		}
		return err
	})
	for i := 0; i < sharedKeys && err == nil; i++ {
		err = w.insist(ctx, func(ctx context.Context) error {
			e := &event{kind: opBirth, object: keyObject(i), in: w.value(0)}
			return w.do(ctx, e, func(ctx context.Context) ([]byte, error) {
				return nil, w.tree.Put(ctx, treeKey(e.object), payload(e.in, objectBytes))
			})
		})
	}
	return err
}

// insist calls f until it succeeds, for at most connectTimeout: a machine that is busy with other work
// may let a session end before the first fault.
func (w *worker) insist(ctx context.Context, f func(context.Context) error) error {
	for until := time.Now().Add(connectTimeout); ; {
		fctx, cancel := context.WithTimeout(ctx, w.Timeout)
		err := f(fctx)
		cancel()
		if err == nil || ctx.Err() != nil || time.Now().After(until) {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// keyRead, keyWrite and keyUpdate are read, write and update of a key.
func (w *worker) keyRead(ctx context.Context, thread int, object string) error {
	return w.do(ctx, &event{thread: thread, kind: opRead, object: object}, func(ctx context.Context) ([]byte, error) {
		value, err := w.tree.Get(ctx, treeKey(object), nil)
		if errors.Is(err, btree.ErrNoKey) {
			return nil, nil // keys are never deleted: one that is gone is a bad payload
		}
		return value, err
	})
}

func (w *worker) keyWrite(ctx context.Context, thread int, object string) error {
	value := w.value(thread)
	return w.do(ctx, &event{thread: thread, kind: opWrite, object: object, in: value}, func(ctx context.Context) ([]byte, error) {
		return nil, w.tree.Put(ctx, treeKey(object), payload(value, objectBytes))
	})
}

func (w *worker) keyUpdate(ctx context.Context, thread int, object string) error {
	value := w.value(thread)
	var was []byte
	return w.do(ctx, &event{thread: thread, kind: opUpdate, object: object, in: value}, func(ctx context.Context) ([]byte, error) {
		err := w.tree.Edit(ctx, treeKey(object), func(old []byte, _ uint64) ([]byte, bool, error) {
			was = append(was[:0], old...)
			return payload(value, objectBytes), false, nil
		})
		if !errors.Is(err, kv.ErrNoEdit) {
			return was, err
		}
		old, version, err := w.tree.GetVersion(ctx, treeKey(object), nil)
		if err != nil {
			if errors.Is(err, client.ErrUnknown) {
				err = errors.New("read of unknown outcome: nothing was written")
			}
			return nil, err
		}
		_, err = w.tree.PutIf(ctx, treeKey(object), payload(value, objectBytes), btree.IfVersion(version))
		return old, err
	})
}

func isKey(object string) bool { return strings.HasPrefix(object, keyPrefix) }
