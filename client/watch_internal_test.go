package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/table"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/msg"
)

// watchBench is a hub without a Client that runs it, one Watcher, and a link to a node that the test plays.
type watchBench struct {
	*watchHub
	w    *Watcher
	link *watchLink
}

func newWatchBench(t *testing.T) *watchBench {
	h := &watchHub{c: &Client{cfg: Config{Timeout: time.Minute}}, ctx: t.Context(), kick: make(chan struct{}, 1), objects: map[uint32]*watchedObject{}, links: map[uint32]*watchLink{}}
	l := &watchLink{hub: h, node: 1, more: make(chan struct{}, 1)}
	h.links[1] = l
	return &watchBench{h, &Watcher{hub: h, ready: make(chan struct{}, 1), done: make(chan struct{}), objects: map[Ref]*watchedObject{}}, l}
}

func live(version uint64) uint64 { return uint64(proto.MakeV(proto.StateLive, version)) }

func refNumber(n uint64) Ref { return Ref{Incarnation: proto.Incarnation(n)} }

// object adds an object as an Add does that waits.
func (b *watchBench) object(t *testing.T, n, version uint64) *watchedObject {
	o, err := b.add(b.w, refNumber(n), 8*n, live(version), true)
	require.NoError(t, err)
	return o
}

// place has the node asked for an object.
func (b *watchBench) place(o *watchedObject) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o.move(b.link)
	b.link.ask(o)
}

// tell plays the node.
func (b *watchBench) tell(o *watchedObject, word uint64) {
	answer := make([]byte, msg.MaxPayload)
	b.told(b.link, answer[:msg.PutWatchTold(answer, 0, o.id, word)])
}

// An Add that fails takes the object away only if no other Add waits for it or has returned for it, and never another object.
func TestAddsOfOneObject(t *testing.T) {
	b := newWatchBench(t)
	failed := errors.New("failed")
	first := b.object(t, 1, 1)
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error, 1)
	go func() { second <- b.w.Add(ctx, refNumber(1), 1) }()
	require.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return first.adds == 2
	}, time.Minute, time.Millisecond)
	require.ErrorIs(t, b.giveUp(first, failed), failed)
	require.Same(t, first, b.w.objects[refNumber(1)], "the second Add waits for it")
	cancel()
	require.ErrorIs(t, <-second, ErrUnreachable, "no node looks: it has waited")
	require.Empty(t, b.w.objects)
	require.Empty(t, b.objects)

	first = b.object(t, 2, 1)
	b.place(first)
	sent, _ := b.link.batch()
	b.link.began(sent)
	require.NoError(t, b.w.Add(t.Context(), refNumber(2), 1))
	require.NoError(t, b.giveUp(first, failed), "a node looks meanwhile")
	require.Contains(t, b.w.objects, refNumber(2))

	first = b.object(t, 3, 1)
	b.w.Remove(refNumber(3))
	again := b.object(t, 3, 1)
	require.ErrorIs(t, b.giveUp(first, failed), errRemoved)
	require.Same(t, again, b.w.objects[refNumber(3)])
	require.ErrorIs(t, b.giveUp(again, failed), failed)
	require.NotContains(t, b.w.objects, refNumber(3))

	kept := b.object(t, 4, 1)
	b.w.seen(refNumber(4), 1, false)
	require.ErrorIs(t, b.giveUp(kept, failed), failed)
	require.Contains(t, b.w.objects, refNumber(4))
}

// An object whose version is named that is older than one told, or named before, is returned, once for each time.
func TestAnOlderVersionIsNamed(t *testing.T) {
	b := newWatchBench(t)
	o := b.object(t, 1, 3)
	b.place(o)
	sent, _ := b.link.batch()
	b.link.began(sent)
	b.tell(o, live(5))
	next := func() bool {
		ref, ok := b.w.TryNext()
		require.True(t, !ok || ref == o.ref)
		return ok
	}
	require.True(t, next())
	require.NoError(t, b.w.Add(t.Context(), o.ref, 4))
	require.True(t, next(), "the node has told 5 already, and does not tell it again")
	require.NoError(t, b.w.Add(t.Context(), o.ref, 4))
	require.False(t, next(), "4 was read again: what the node has told was taken back")
	require.NoError(t, b.w.Add(t.Context(), o.ref, 6))
	require.False(t, next())
	b.tell(o, live(6))
	require.False(t, next())
	require.NoError(t, b.w.Add(t.Context(), o.ref, 5))
	require.True(t, next(), "the node looks for what is not 6")
	b.tell(o, uint64(proto.MakeV(proto.StateFree, 5)))
	require.True(t, next())
	require.NoError(t, b.w.Add(t.Context(), o.ref, 5))
	require.True(t, next(), "the object was freed")
}

// A node that has no room: the Adds that wait fail, the link goes on, and what was watched before is asked for again.
func TestANodeRefusesWatches(t *testing.T) {
	b := newWatchBench(t)
	before := b.object(t, 1, 1)
	b.place(before)
	sent, _ := b.link.batch()
	b.link.began(sent)
	o := b.object(t, 2, 1)
	b.place(before)
	b.place(o)
	sent, _ = b.link.batch()
	require.Len(t, sent, 2)
	b.refuse(b.link, sent, &msg.Refusal{Procedure: msg.Watch, Text: "full"})
	<-o.on
	var refusal *msg.Refusal
	require.ErrorAs(t, o.err, &refusal)
	require.NotContains(t, b.w.objects, o.ref)
	b.mu.Lock()
	require.Equal(t, []*watchedObject{before}, b.refused)
	require.Nil(t, before.link)
	require.Same(t, b.link, b.links[1])
	b.mu.Unlock()
	ref, ok := b.w.TryNext()
	require.True(t, ok, "no node looks: the user does")
	require.Equal(t, before.ref, ref)
}

// What comes back to a node is not added before it is dropped, however much there is to drop.
func TestDropsGoFirst(t *testing.T) {
	b := newWatchBench(t)
	o := b.object(t, 1, 1)
	b.place(o)
	b.link.batch()
	b.mu.Lock()
	for id := range uint32(msg.MaxWatchDrops) {
		b.link.drop(1000 + id)
	}
	b.link.drop(o.id)
	b.mu.Unlock()
	b.place(o)
	sent, dropped := b.link.batch()
	require.Empty(t, sent)
	require.Len(t, dropped, msg.MaxWatchDrops)
	sent, dropped = b.link.batch()
	require.Equal(t, []uint32{o.id}, dropped)
	require.Len(t, sent, 1)
}

// Objects that were told and removed leave nothing behind, and a link without objects ends.
func TestRemovedObjects(t *testing.T) {
	b := newWatchBench(t)
	for n := range uint64(1000) {
		o := b.object(t, n, 1)
		b.place(o)
		b.tell(o, live(2))
		require.False(t, b.idle(b.link))
		b.w.Remove(o.ref)
	}
	require.Less(t, len(b.w.changed), 32)
	_, ok := b.w.TryNext()
	require.False(t, ok)

	// The table has no primary for it: the node that was asked drops it.
	o := b.object(t, 1, 1)
	b.place(o)
	b.mu.Lock()
	b.link.dropped = nil
	b.placeOne(nil, &tableView{table: &table.Table{}}, o)
	require.Equal(t, []uint32{o.id}, b.link.dropped)
	require.Nil(t, o.link)
	b.mu.Unlock()
	require.True(t, b.idle(b.link))
	require.Empty(t, b.links)
}

// A Watcher is behind while no node compares an object: before it was asked, and when it has no region, the link is lost, or the epoch is another one.
func TestWatcherIsBehind(t *testing.T) {
	b := newWatchBench(t)
	b.delays = map[uint32]time.Duration{}
	require.Zero(t, b.w.Behind())
	o := b.object(t, 1, 1)
	behind := func() { require.Eventually(t, func() bool { return b.w.Behind() > 0 }, time.Minute, time.Microsecond) }
	begin := func() {
		b.place(o)
		behind()
		sent, _ := b.link.batch()
		behind()
		b.link.began(sent)
		require.Zero(t, b.w.Behind())
	}
	behind()
	begin()
	b.tell(o, live(2))
	require.Zero(t, b.w.Behind(), "the change was delivered")
	b.tell(o, msg.WatchGone)
	behind()
	begin()
	b.place(o)
	sent, _ := b.link.batch()
	b.mu.Lock()
	o.at++
	b.mu.Unlock()
	b.link.began(sent)
	behind()
	begin()
	b.lost(b.link, errors.New("broken"))
	behind()
	b.links[1] = b.link
	begin()
	b.place(o)
	sent, _ = b.link.batch()
	b.refuse(b.link, sent, &msg.Refusal{Procedure: msg.Watch, Text: "full"})
	require.Zero(t, b.w.Behind(), "the user looks")
	b.w.Remove(o.ref)
	require.Zero(t, b.w.Behind())
}
