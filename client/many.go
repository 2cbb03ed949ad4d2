package client

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// manyLanes bounds the lanes that one AllocMany or FreeMany uses, so that other calls find
// idle lanes.
const manyLanes = 8

// AllocMany makes one object for each payload, all with the same options: refs[i] is the
// object of payloads[i] if errs[i] is nil. The objects are made concurrently on several
// lanes and independently of each other: some may be made while others fail.
func (c *Client) AllocMany(ctx context.Context, payloads [][]byte, o AllocOptions) (refs []Ref, errs []error) {
	refs = make([]Ref, len(payloads))
	errs = c.forEach(len(payloads), func(i int) (err error) {
		refs[i], err = c.Alloc(ctx, payloads[i], o)
		return err
	})
	return refs, errs
}

// FreeMany ends objects independently of each other: errs[i] is the answer for refs[i].
func (c *Client) FreeMany(ctx context.Context, refs []Ref) []error {
	return c.forEach(len(refs), func(i int) error { return c.Free(ctx, refs[i]) })
}

// forEach calls f for 0 to n-1 from several goroutines and returns the errors by index.
func (c *Client) forEach(n int, f func(i int) error) []error {
	errs := make([]error, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, manyLanes, max(1, c.cfg.Lanes/2)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				errs[i] = f(i)
			}
		})
	}
	wg.Wait()
	return errs
}

// ReadMany reads objects and calls fn once for each, in any order: payload or err is the
// answer for refs[i]. The payload is valid until fn returns. fn must not use the Client. If
// ReadMany itself returns an error, fn was not called for all of them. One round for up to
// 128 small objects on a node.
func (c *Client) ReadMany(ctx context.Context, refs []Ref, fn func(i int, payload []byte, err error)) error {
	l, err := c.lane(ctx, KindReadMany)
	if err != nil {
		return err
	}
	err = l.readObjects(refs, fn)
	c.done(l, err)
	return err
}

// WriteMany replaces the payloads of objects independently of each other: errs[i] is the
// answer for refs[i] and payloads[i], as that of Write. Two rounds for up to 64 small objects
// on a node, three with replicas. ErrArgument if there are not as many payloads as refs.
func (c *Client) WriteMany(ctx context.Context, refs []Ref, payloads [][]byte) []error {
	errs := make([]error, len(refs))
	fail := func(err error) []error {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	if len(payloads) != len(refs) {
		return fail(fmt.Errorf("%w: %d refs and %d payloads", ErrArgument, len(refs), len(payloads)))
	}
	l, err := c.lane(ctx, KindWriteMany)
	if err != nil {
		return fail(err)
	}
	l.writeObjects(refs, payloads, errs)
	c.done(l, nil)
	return errs
}
