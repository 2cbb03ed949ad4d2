package redis

import (
	"context"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// gated is the tree of a gateway. step, if it is not nil, runs before each operation: tests
// stop a gateway there, end it, or make the operation fail.
type gated struct {
	*kv.Tree
	step func(write bool) failure // called by the connection's goroutine
}

// failure is how an operation on the tree fails; without err it does not.
type failure struct {
	err  error // returned in the place of the result
	made bool  // the operation is made nevertheless
}

// next says how the operation that comes fails. If skip is set it is not made.
func (t *gated) next(write bool) (f failure, skip bool) {
	if t.step != nil {
		f = t.step(write)
	}
	return f, f.err != nil && !f.made
}

// Get and the following methods are those of the tree, with the failure that a test has put in.
func (t *gated) Get(ctx context.Context, key, dst []byte) ([]byte, error) {
	if f, _ := t.next(false); f.err != nil {
		return nil, f.err
	}
	return t.Tree.Get(ctx, key, dst)
}

func (t *gated) GetVersion(ctx context.Context, key, dst []byte) ([]byte, uint64, error) {
	if f, _ := t.next(false); f.err != nil {
		return nil, 0, f.err
	}
	return t.Tree.GetVersion(ctx, key, dst)
}

func (t *gated) PutIf(ctx context.Context, key, value []byte, cond btree.Cond) (uint64, error) {
	f, skip := t.next(true)
	if skip {
		return 0, f.err
	}
	version, err := t.Tree.PutIf(ctx, key, value, cond)
	if f.err != nil {
		return 0, f.err
	}
	return version, err
}

// PutManyIf fails for all keys alike if the step says so, whether the calls are made or not.
func (t *gated) PutManyIf(ctx context.Context, keys, values [][]byte, cond btree.Cond) []error {
	f, skip := t.next(true)
	var errs []error
	if skip {
		errs = make([]error, len(keys))
	} else {
		errs = t.Tree.PutManyIf(ctx, keys, values, cond)
	}
	if f.err != nil {
		for i := range errs {
			errs[i] = f.err
		}
	}
	return errs
}

func (t *gated) WriteRun(ctx context.Context, writes []btree.Write) (n int, err error) {
	f, skip := t.next(true)
	if n = 1; !skip {
		n, err = t.Tree.WriteRun(ctx, writes)
	}
	if f.err != nil {
		for i := range writes[:n] {
			writes[i].Err = f.err
		}
	}
	return n, err
}

func (t *gated) WriteEach(ctx context.Context, writes []btree.Write) (err error) {
	f, skip := t.next(true)
	if skip {
		for i := range writes {
			writes[i].Alone = false
		}
	} else {
		err = t.Tree.WriteEach(ctx, writes)
	}
	for i := range writes {
		if f.err != nil && !writes[i].Alone {
			writes[i].Err = f.err
		}
	}
	return err
}

func (t *gated) EditVersion(ctx context.Context, key []byte, edit func(old []byte, version uint64) ([]byte, bool, error)) (uint64, error) {
	f, skip := t.next(true)
	if skip {
		return 0, f.err
	}
	version, err := t.Tree.EditVersion(ctx, key, edit)
	if f.err != nil {
		return 0, f.err
	}
	return version, err
}

func (t *gated) Delete(ctx context.Context, key []byte) error {
	return t.DeleteIf(ctx, key, btree.Cond{})
}

func (t *gated) DeleteIf(ctx context.Context, key []byte, cond btree.Cond) error {
	f, skip := t.next(true)
	if skip {
		return f.err
	}
	err := t.Tree.DeleteIf(ctx, key, cond)
	if f.err != nil {
		return f.err
	}
	return err
}

func (t *gated) GetMany(ctx context.Context, keys [][]byte, fn func(i int, value []byte, version uint64, err error)) error {
	if f, _ := t.next(false); f.err != nil {
		return f.err
	}
	return t.Tree.GetMany(ctx, keys, fn)
}

func (t *gated) Scan(ctx context.Context, r btree.Range, fn func(key, value []byte, version uint64) bool) error {
	if f, _ := t.next(false); f.err != nil {
		return f.err
	}
	return t.Tree.Scan(ctx, r, fn)
}

func (t *gated) Count(ctx context.Context, r btree.Range) (int, error) {
	if f, _ := t.next(false); f.err != nil {
		return 0, f.err
	}
	return t.Tree.Count(ctx, r)
}
