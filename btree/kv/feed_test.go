package kv_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// fed is a receiver that outlives its feeds.
type fed struct {
	t        *testing.T
	cluster  *testcluster.Cluster
	c        *client.Client // of the feed
	tree     *kv.Tree       // followed
	feed     *kv.Feed
	value    map[string]string
	position uint64
}

func newFed(t *testing.T, cluster *testcluster.Cluster, tree string) *fed {
	x := &fed{t: t, cluster: cluster, value: map[string]string{}}
	x.connect(tree)
	return x
}

// connect begins as a new process would.
func (x *fed) connect(tree string) {
	x.c = x.cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 1, Name: "receiver"})
	var err error
	x.tree, err = kv.OpenOrCreate(x.t.Context(), x.c, tree, btree.Config{})
	require.NoError(x.t, err)
}

// fence returns when no verb of a session changes a byte any more.
func fence(t *testing.T, cluster *testcluster.Cluster, session uint32) {
	_, err := cluster.Control().RevokeSession(t.Context(), connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: session, Reason: "test"}))
	if connect.CodeOf(err) != connect.CodeNotFound { // it has ended by itself
		require.NoError(t, err)
	}
}

func (x *fed) follow(o kv.FeedOptions) {
	if o.State == "" {
		o.State = x.tree.Name() + ".feed"
	}
	var err error
	require.Eventually(x.t, func() bool { // the nodes learn of the end of a session a moment later
		x.feed, err = x.tree.Follow(x.t.Context(), o)
		return !errors.Is(err, kv.ErrFeedOpen)
	}, patience, time.Millisecond)
	require.NoError(x.t, err)
}

// die ends the receiver in the middle: its session ends, and its feed is not closed.
func (x *fed) die() {
	tree := x.tree.Name()
	require.NoError(x.t, x.c.Close())
	x.connect(tree)
}

// next takes one batch, and says what it was.
func (x *fed) next() (told []string) {
	events, err := x.feed.Next(x.t.Context())
	require.NoError(x.t, err)
	for _, e := range events {
		switch key := string(e.Key); e.Kind {
		case kv.Synced:
			require.LessOrEqual(x.t, e.Position, max(x.position, x.feed.Acknowledged()))
			told = append(told, "synced")
			continue
		case kv.Put:
			x.value[key] = string(e.Value)
			told = append(told, key+"="+string(e.Value))
		case kv.Delete:
			delete(x.value, key)
			told = append(told, "-"+key)
		}
		require.Greater(x.t, e.Position, x.position)
		x.position = e.Position
	}
	return told
}

// synced takes batches until all that differed was told, in the order of the texts.
func (x *fed) synced() (told []string) {
	for !slices.Contains(told, "synced") {
		told = append(told, x.next()...)
	}
	told = slices.DeleteFunc(told, func(s string) bool { return s == "synced" })
	slices.Sort(told)
	return told
}

func (x *fed) ack() { require.NoError(x.t, x.feed.Ack(x.t.Context(), x.position)) }

func (x *fed) del(key string) { require.NoError(x.t, x.tree.Delete(x.t.Context(), []byte(key))) }

// A receiver gets what has changed while no feed was open, removals included, wherever the one before was killed.
func TestFeedGoesOn(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	for _, key := range []string{"\x00", "a", "b", "z"} {
		put(t, x.tree, key, "1")
	}
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"\x00=1", "a=1", "b=1", "z=1"}, x.synced())
	x.ack()
	require.Equal(t, x.position, x.feed.Acknowledged())
	put(t, x.tree, "a", "2")
	require.Equal(t, []string{"a=2"}, x.next())
	require.NoError(t, x.feed.Close())
	_, err := x.feed.Next(t.Context())
	require.Error(t, err)

	// Not acknowledged: told again. Away: a Put, a Delete, a Delete of the key that lies beside the head.
	put(t, x.tree, "c", "1")
	x.del("b")
	x.del("\x00")
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"-\x00", "-b", "a=2", "c=1"}, x.synced())
	x.ack()

	// A key is put, delivered and, when its receiver is dead, deleted.
	put(t, x.tree, "d", "1")
	require.Equal(t, []string{"d=1"}, x.next())
	x.die()
	x.del("d")
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"-d"}, x.synced())

	// A Delete was delivered, and not acknowledged; an event before it was.
	x.ack()
	put(t, x.tree, "e", "1")
	require.Equal(t, []string{"e=1"}, x.next())
	before := x.position
	x.del("c")
	require.Equal(t, []string{"-c"}, x.next())
	require.NoError(t, x.feed.Ack(t.Context(), before))
	x.die()
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"-c"}, x.synced())
	x.ack()

	// A key is deleted and put again before both are acknowledged.
	x.del("e")
	require.Equal(t, []string{"-e"}, x.next())
	put(t, x.tree, "e", "2")
	require.Equal(t, []string{"e=2"}, x.next())
	x.ack()
	require.NoError(t, x.feed.Close())
	x.del("e")
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"-e"}, x.synced())
	x.ack()

	// The Put of z is stored in the state, and its receiver is dead; the next one acknowledges other keys.
	put(t, x.tree, "z", "2")
	require.Equal(t, []string{"z=2"}, x.next())
	x.die()
	// More of these than the head has spans of positions.
	for range kv.FeedVoids + 1 {
		put(t, x.tree, "a", "3")
		x.follow(kv.FeedOptions{Range: btree.PrefixRange("a")})
		require.Equal(t, []string{"a=3"}, x.synced())
		x.ack()
		require.NoError(t, x.feed.Close())
	}
	x.follow(kv.FeedOptions{KeysOnly: true})
	require.Equal(t, []string{"z="}, x.synced())
	x.ack()

	// The acknowledged versions can be read.
	state, err := kv.Open(t.Context(), x.c, "table.feed", btree.Config{})
	require.NoError(t, err)
	_, version, err := x.tree.GetVersion(t.Context(), []byte("a"), nil)
	require.NoError(t, err)
	applied := func(key string) uint64 {
		v, err := x.tree.Applied(t.Context(), state, []byte(key))
		require.NoError(t, err)
		return v
	}
	require.Equal(t, version, applied("a"))
	require.Zero(t, applied("e"))
	require.Zero(t, applied("\x00"))
	put(t, x.tree, "a", "4")
	require.Equal(t, []string{"a="}, x.next())
	require.Zero(t, applied("a"), "delivered, and not acknowledged")
	_, err = x.tree.Applied(t.Context(), x.tree, []byte("a"))
	require.ErrorIs(t, err, kv.ErrNotState)

	// A tree that is gone, and one of the same name.
	require.NoError(t, x.tree.Drop(t.Context()))
	_, err = x.feed.Next(t.Context())
	require.ErrorIs(t, err, btree.ErrNoTree)
	require.NoError(t, x.feed.Close())
	x.connect("table")
	put(t, x.tree, "a", "new")
	x.follow(kv.FeedOptions{})
	require.Equal(t, []string{"-z", "a=new"}, x.synced())
	require.Equal(t, map[string]string{"a": "new"}, x.value)
	require.NoError(t, x.feed.Close())

	// Trees of one name, with the same versions.
	for _, value := range []string{"first", "second"} {
		x.connect("again")
		put(t, x.tree, "a", value)
		if value == "first" {
			x.position = 0 // of another state
		}
		x.follow(kv.FeedOptions{})
		require.Equal(t, []string{"a=" + value}, x.synced())
		x.ack()
		require.NoError(t, x.feed.Close())
		require.NoError(t, x.tree.Drop(t.Context()))
	}
}

// One feed has a state, and a feed whose session has ended changes nothing.
func TestFeedHasOneOwner(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	put(t, x.tree, "a", "1")
	other := newFed(t, cluster, "table")
	x.follow(kv.FeedOptions{})
	x.synced()
	for _, tree := range []*kv.Tree{x.tree, other.tree} {
		_, err := tree.Follow(t.Context(), kv.FeedOptions{State: "table.feed"})
		require.ErrorIs(t, err, kv.ErrFeedOpen)
	}
	fence(t, cluster, x.c.SessionID())
	other.follow(kv.FeedOptions{})
	require.Equal(t, []string{"a=1"}, other.synced())
	other.ack()
	require.ErrorIs(t, x.feed.Ack(t.Context(), x.position), client.ErrFenced)
	_, err := x.feed.Next(t.Context())
	require.ErrorIs(t, err, client.ErrFenced)
	bound, cancel := x.feed.Bound(t.Context())
	defer cancel()
	require.Error(t, x.tree.Put(bound, []byte("late"), nil))
	_, err = other.tree.Get(t.Context(), []byte("late"), nil)
	require.ErrorIs(t, err, btree.ErrNoKey)
	require.NoError(t, x.feed.Close())
	require.NoError(t, other.feed.Close(), "the feed that has ended has not given up what is not its own")
	x.follow(kv.FeedOptions{})
	require.Empty(t, x.synced())

	// Bad input changes nothing.
	require.ErrorContains(t, x.feed.Ack(t.Context(), 1<<60), "no event")
	for state, want := range map[string]error{"table": kv.ErrNotState, "full": kv.ErrNotState, "headed": kv.ErrNotState} {
		if state != "table" {
			tree, err := kv.Create(t.Context(), x.c, state, btree.Config{})
			require.NoError(t, err)
			put(t, tree, map[string]string{"full": "key", "headed": "\x00"}[state], "data")
		}
		_, err := x.tree.Follow(t.Context(), kv.FeedOptions{State: state})
		require.ErrorIs(t, err, want)
	}
}

// A receiver that acknowledges nothing gets ErrPending, and one that is slow gets the latest of each key.
func TestFeedIsBounded(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	x := newFed(t, cluster, "table")
	n := 0
	_, err := x.tree.Load(t.Context(), func() (key, value []byte, ok bool) {
		n++
		return fmt.Appendf(nil, "%06d", n), nil, n <= kv.MaxPending+100
	})
	require.NoError(t, err)
	x.follow(kv.FeedOptions{})
	for err == nil {
		var events []kv.FeedEvent
		events, err = x.feed.Next(t.Context())
		require.LessOrEqual(t, len(events), 512)
		for _, e := range events {
			x.position = e.Position
			x.value[string(e.Key)] = ""
		}
	}
	require.ErrorIs(t, err, kv.ErrPending)
	require.Len(t, x.value, kv.MaxPending)
	for i := range 100 { // of keys that were told
		put(t, x.tree, "000001", fmt.Sprint(i))
	}
	x.ack()
	var told []string
	for x.value["000001"] == "" || len(x.value) < kv.MaxPending+100 {
		told = append(told, x.next()...)
	}
	require.Equal(t, 1, len(told)-100-strings.Count(strings.Join(told, " "), "synced"), "the 100 Puts are told as one")
	require.Equal(t, "99", x.value["000001"])
	require.NoError(t, x.feed.Close())

	x.follow(kv.FeedOptions{State: "bounded", MaxBytes: 1000})
	for err = nil; err == nil; {
		_, err = x.feed.Next(t.Context())
	}
	require.ErrorIs(t, err, kv.ErrWatchTooLarge)
	require.NoError(t, x.feed.Close())
}

// asFeed makes the test binary a process that follows a tree, and is going to be killed.
const asFeed = "QUARRYTEST_KV_FEED"

// feedJob is what that process does.
type feedJob struct {
	URL, Tree string
	Seed      uint64
	Once      bool // ends at the event Synced
}

// fedLine is a line of that process: first its session, then events.
type fedLine struct {
	Session uint32
	kv.FeedEvent
}

// feedProcess writes events to a pipe, and acknowledges them, some of them later.
func feedProcess(spec string) error {
	var j feedJob
	if err := json.Unmarshal([]byte(spec), &j); err != nil {
		return err
	}
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{j.URL}, Transport: client.TransportTCP, Timeout: patience, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer c.Close()
	if err := json.NewEncoder(os.Stdout).Encode(fedLine{Session: c.SessionID()}); err != nil {
		return err
	}
	tree, err := kv.Open(ctx, c, j.Tree, btree.Config{})
	if err != nil {
		return err
	}
	feed, err := tree.Follow(ctx, kv.FeedOptions{State: j.Tree + ".feed"})
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(j.Seed, 5))
	for {
		events, err := feed.Next(ctx)
		if err != nil {
			return err
		}
		out := bufio.NewWriter(os.Stdout)
		for _, e := range events {
			if err := json.NewEncoder(out).Encode(fedLine{FeedEvent: e}); err != nil {
				return err
			}
		}
		if err := out.Flush(); err != nil {
			return err
		}
		last := events[len(events)-1]
		at := events[rng.IntN(len(events))].Position
		if synced := slices.ContainsFunc(events, func(e kv.FeedEvent) bool { return e.Kind == kv.Synced }); synced && j.Once {
			return errors.Join(feed.Ack(ctx, last.Position), feed.Close())
		}
		if rng.IntN(3) > 0 {
			if err := feed.Ack(ctx, at); err != nil {
				return err
			}
		}
	}
}

// A receiver whose process is killed at any moment has in the end what the tree has, with writers that split and merge leaves.
func TestFeedIsKilled(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{Replicas: 1, Transport: client.TransportTCP})
	tree, err := kv.Create(t.Context(), c, "killed", btree.Config{NodeBytes: 1 << 10})
	require.NoError(t, err)
	version, value, position := map[string]uint64{}, map[string][]byte{}, uint64(0)
	rng := rand.New(rand.NewPCG(8, 8))
	lives := 8
	if testing.Short() {
		t.Log("-short: fewer lives")
		lives = 4
	}
	stop := func() {}
	for life := 0; life <= lives; life++ {
		last := life == lives
		switch {
		case last:
			stop()
		case life%2 == 0: // while the receiver is dead, too
			stop()
			stop = writers(t, []*kv.Tree{tree}, 200)
		default: // no change behind the death
			stop()
			stop = func() {}
			for key := range value {
				if rng.IntN(3) == 0 {
					_ = tree.Delete(t.Context(), []byte(key))
				}
			}
		}
		spec, err := json.Marshal(feedJob{URL: cluster.Controller.URL(), Tree: "killed", Seed: uint64(life), Once: last || life%2 == 1})
		require.NoError(t, err)
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), asFeed+"="+string(spec))
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines, session, left := json.NewDecoder(out), uint32(0), rng.IntN(400)
		for {
			var l fedLine
			if err := lines.Decode(&l); err != nil { // the end, or half a line
				break
			}
			if l.Session != 0 {
				session = l.Session
				continue
			}
			if left--; left == 0 && !last {
				require.NoError(t, cmd.Process.Kill())
			}
			key := string(l.Key)
			if l.Kind == kv.Synced {
				continue
			}
			require.Greater(t, l.Position, position)
			require.GreaterOrEqual(t, l.Version, version[key], "%q", key)
			position, version[key], value[key] = l.Position, l.Version, l.Value
			if l.Kind == kv.Delete {
				delete(value, key)
			}
		}
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); last {
			require.NoError(t, err, stderr.String())
			break
		}
		require.NotZero(t, session, stderr.String())
		fence(t, cluster, session)
	}
	want := map[string][]byte{}
	require.NoError(t, tree.Scan(t.Context(), btree.Range{}, func(key, v []byte, at uint64) bool {
		want[string(key)] = slices.Clone(v)
		require.Equal(t, at, version[string(key)], "%q", key)
		return true
	}))
	require.Len(t, value, len(want))
	for key := range want {
		require.Contains(t, value, key)
		require.Equal(t, len(want[key]), len(value[key]))
	}
}
