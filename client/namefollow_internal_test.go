package client

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// hubOfOne is a hub whose stream is open, with one name, and a follower of it.
func hubOfOne() (h *nameHub, f *FollowedName, renewed *int) {
	h = &nameHub{c: &Client{control: &controllerCalls{}}, names: map[string]*keptName{}}
	f = &FollowedName{hub: h, name: "a", changed: make(chan struct{}, 1), done: make(chan struct{})}
	h.names["a"] = &keptName{followers: map[*FollowedName]struct{}{f: {}}}
	renewed = new(int)
	h.renew = context.CancelFunc(func() { *renewed++ })
	return h, f, renewed
}

// pushOf is a message with the name, which stands for an object.
func pushOf(revision, object uint64) *quarrypb.NamesUpdate {
	ref, _ := Ref{Addr: proto.MakeAddr(1, 4096), Incarnation: proto.MakeIncarnation(0, object)}.AppendBinary(nil)
	return &quarrypb.NamesUpdate{Revision: revision, Names: []*quarrypb.Name{{Name: "a", Kind: "object", Ref: ref, Revision: revision}}}
}

// TestHazard213_NamesOfARestoredStore: the controllers go on with a copy of their store, in which the name stands for something else. The revisions that were heard before
// say nothing of it.
func TestHazard213_NamesOfARestoredStore(t *testing.T) {
	h, f, renewed := hubOfOne()
	h.take(pushOf(100, 1), clock.Now(), true)
	h.beat(clock.Now(), 100)
	e, err := f.Entry()
	require.NoError(t, err)
	require.Equal(t, uint64(100), e.Revision)
	was := clock.Now()
	h.beat(clock.Now(), 90)
	require.Equal(t, 1, *renewed)
	h.take(pushOf(100, 1), was, false) // was under way
	h.beat(clock.Now(), 91)
	_, err = f.Entry()
	require.ErrorIs(t, err, ErrUnreachable)
	require.ErrorIs(t, f.Doubt(), ErrUnreachable)
	h.take(pushOf(100, 2), clock.Now(), true)
	e, err = f.Entry()
	require.NoError(t, err)
	require.Equal(t, proto.MakeIncarnation(0, 2), e.Ref.Incarnation)

	// The stream was told more than a heartbeat has said: its end and the next one's begin show the copy.
	h.take(pushOf(110, 1), clock.Now(), false)
	h.take(pushOf(105, 3), clock.Now(), true)
	e, err = f.Entry()
	require.NoError(t, err)
	require.Equal(t, uint64(105), e.Revision)
	h.take(pushOf(104, 2), clock.Now(), false)
	e, err = f.Entry()
	require.NoError(t, err)
	require.Equal(t, uint64(105), e.Revision)
}

// TestNamesOfASuspendedHost: the clock of leases does not count a suspension, so that an entry of before seems to be of a moment ago.
func TestNamesOfASuspendedHost(t *testing.T) {
	h, f, renewed := hubOfOne()
	h.take(pushOf(100, 1), clock.Now(), true)
	sent := clock.Now()
	require.NoError(t, f.Doubt())
	h.suspended()
	h.beat(sent, 100) // was under way
	require.Equal(t, 1, *renewed)
	_, err := f.Entry()
	require.ErrorIs(t, err, ErrUnreachable)
	h.take(pushOf(101, 2), clock.Now(), true)
	require.NoError(t, f.Doubt())
	(*nameHub)(nil).suspended()
}
