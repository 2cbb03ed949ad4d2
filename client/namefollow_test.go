package client_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestFollowedNames: an entry is what was pushed last, for as many as follow it; names may come and go.
func TestFollowedNames(t *testing.T) {
	ctx := t.Context()
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	ref, err := other.Alloc(ctx, []byte("x"), client.AllocOptions{})
	require.NoError(t, err)
	follow := func(name string) *client.FollowedName {
		f, err := c.Names().Follow(ctx, name)
		require.NoError(t, err)
		return f
	}
	f, twice := follow("a"), follow("a")
	for _, x := range []*client.FollowedName{f, twice} {
		_, err := x.Entry()
		require.ErrorIs(t, err, client.ErrNoName)
	}
	until := func(f *client.FollowedName, want func(e client.Name, err error) bool) {
		t.Helper()
		wctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		for !want(f.Entry()) {
			select {
			case <-f.Changed():
			case <-wctx.Done():
				require.Fail(t, "not pushed")
			}
		}
	}
	made, err := other.Names().Create(ctx, "a", "object", ref)
	require.NoError(t, err)
	made.Created = made.Created.UTC()
	for _, x := range []*client.FollowedName{f, twice} {
		until(x, func(e client.Name, err error) bool { return err == nil && e.Revision == made.Revision })
	}
	e, err := f.Entry()
	require.NoError(t, err)
	require.Equal(t, made, e)

	late := follow("late") // a second name: the stream is another one, and the first name goes on
	require.NoError(t, other.Names().Delete(ctx, "a", 0))
	until(f, func(_ client.Name, err error) bool { return err != nil })
	_, err = f.Entry()
	require.ErrorIs(t, err, client.ErrNoName)
	_, err = other.Names().Create(ctx, "late", "object", ref)
	require.NoError(t, err)
	until(late, func(_ client.Name, err error) bool { return err == nil })

	for _, bad := range []string{"", strings.Repeat("x", 256), "line\n"} {
		_, err = c.Names().Follow(ctx, bad)
		require.ErrorIs(t, err, client.ErrBadName)
	}
	twice.Close()
	_, err = twice.Entry()
	require.ErrorIs(t, err, client.ErrClosed)
	_, err = f.Entry()
	require.ErrorIs(t, err, client.ErrNoName, "who follows it too")
	stats := c.Stats().Names
	require.Equal(t, 2, stats.Followed)
	require.GreaterOrEqual(t, stats.Changes, uint64(3))
	require.Zero(t, stats.Late)
	f.Close()
	late.Close()
	late.Close()
	require.Zero(t, c.Stats().Names.Followed)
	again := follow("late")
	_, err = again.Entry()
	require.NoError(t, err)
	require.NoError(t, c.Close())
	_, err = again.Entry()
	require.ErrorIs(t, err, client.ErrClosed)
	_, err = c.Names().Follow(ctx, "a")
	require.Error(t, err)
}

func TestFollowedNamesAreBounded(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	f, err := c.Names().Follow(t.Context(), "0")
	require.NoError(t, err)
	client.FollowForTest(c, client.MaxFollowedNames-1)
	_, err = c.Names().Follow(t.Context(), "one more")
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, fmt.Sprint(client.MaxFollowedNames))
	f.Close()
	f, err = c.Names().Follow(t.Context(), "one more")
	require.NoError(t, err)
	f.Close()
}
