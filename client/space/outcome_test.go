package space_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// cancelAt returns a context that ends when the client sends a request of a method the nth time, whose answer is lost.
func cancelAt(t *testing.T, line *testcluster.Line, method string, nth int) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	var mu sync.Mutex
	seen := 0
	line.Lose(func(m string) bool {
		mu.Lock()
		defer mu.Unlock()
		if m == method {
			seen++
		}
		if m != method || seen < nth {
			return false
		}
		cancel()
		return true
	})
	return ctx
}

// TestContextsThatEndInAChange: the context ends between the requests of a change of a space. What is done is not called undone because the
// table could not be read, and what may be done in part is unknown.
func TestContextsThatEndInAChange(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Capacity: 160 * mib})
	line := c.Line()
	cl, err := client.Connect(t.Context(), client.Config{Controllers: []string{line.URL}, Replicas: 1})
	require.NoError(t, err)
	t.Cleanup(func() { line.Lose(nil); require.NoError(t, cl.Close()) })
	one := space.Options{RegionBytes: mib}
	s, err := space.Create(t.Context(), cl, "s", mib, one)
	require.NoError(t, err)
	check := func(err error, unknown bool) {
		t.Helper()
		line.Lose(nil)
		if unknown {
			require.ErrorIs(t, err, client.ErrUnknown)
			require.ErrorIs(t, err, context.Canceled)
		} else {
			require.NoError(t, err)
		}
	}
	// Done, and the table is not read.
	check(s.Grow(cancelAt(t, line, "ReadTable", 1), mib), false)
	o, err := space.Open(t.Context(), cl, "s")
	require.NoError(t, err)
	require.EqualValues(t, 2*mib, o.Bytes())
	check(space.Delete(cancelAt(t, line, "ReadTable", 1), cl, "s"), false)
	_, err = space.Open(t.Context(), cl, "s")
	require.ErrorIs(t, err, client.ErrNoName)

	// Made, and neither opened nor removed again.
	_, err = space.Create(cancelAt(t, line, "ReadTable", 1), cl, "s", mib, one)
	check(err, true)
	o, err = space.Open(t.Context(), cl, "s")
	require.NoError(t, err)

	// Grown in part.
	check(o.Grow(cancelAt(t, line, "ReadTable", 1), (client.MaxRawRegions+1)*mib), true)
	require.NoError(t, ignoreAddress(o.Load64(t.Context(), o.Base()+client.MaxRawRegions*mib)))
	require.EqualValues(t, (client.MaxRawRegions+1)*mib, o.Bytes())

	// Removed in part.
	check(space.Delete(cancelAt(t, line, "DeleteSpace", 2), cl, "s"), true)
	check(space.Delete(cancelAt(t, line, "DeleteSpace", 1), cl, "s"), true)
	require.NoError(t, space.Delete(t.Context(), cl, "s"))
}

// ignoreAddress is for a call that has the space look again.
func ignoreAddress(_ uint64, err error) error {
	if errors.Is(err, space.ErrAddress) {
		return nil
	}
	return err
}

// TestDeleteBesideChanges: a space is deleted while clients change a word of it. That ends no session.
func TestDeleteBesideChanges(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	cl := c.Connect(client.Config{Transport: client.TransportTCP, Replicas: 2})
	other := c.Connect(client.Config{})
	for range 5 {
		s, err := space.Create(ctx, cl, "s", mib, space.Options{RegionBytes: mib, Replicas: 2})
		require.NoError(t, err)
		var wg sync.WaitGroup
		begun := make(chan struct{}, 4)
		for range 4 {
			wg.Go(func() {
				for i := 0; ; i++ {
					if i == 3 {
						begun <- struct{}{}
					}
					if _, err := s.Add64(ctx, s.Base(), 1); err != nil {
						require.True(t, errors.Is(err, client.ErrNoRegion) || errors.Is(err, client.ErrUnknown), "%v", err)
						return
					}
				}
			})
		}
		for range 4 {
			<-begun
		}
		require.NoError(t, space.Delete(ctx, other, "s"))
		wg.Wait()
	}
	require.EqualValues(t, 1, cl.Stats().Sessions)
}

// TestSlowLook: a look that has read the table before the space grew does not put the smaller layout back.
func TestSlowLook(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{})
	line := c.Line()
	cl, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Replicas: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cl.Close()) })
	s, err := space.Create(ctx, cl, "s", mib, space.Options{RegionBytes: mib})
	require.NoError(t, err)
	other, err := space.Open(ctx, cl, "s")
	require.NoError(t, err)
	release := s.HoldLayout()
	reads := make(chan struct{}, 100)
	line.Lose(func(m string) bool {
		if m == "ReadTable" {
			reads <- struct{}{}
		}
		return false
	})
	looked := make(chan error)
	go func() { _, err := s.Resolve(ctx, s.Base()); looked <- err }()
	<-reads
	require.NoError(t, other.Grow(ctx, mib))
	release()
	require.NoError(t, <-looked)
	require.EqualValues(t, 2*mib, s.Bytes())
}
