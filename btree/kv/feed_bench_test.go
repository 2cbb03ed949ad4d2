package kv_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// lags are those of changes: from the beginning of the PutMany that made them to the event with their version or a later one.
type lags struct {
	mu   sync.Mutex
	open [][]int64 // by key: when its changes that were not delivered began
	took []time.Duration
}

func (l *lags) event(key int, began int64) {
	now := time.Now().UnixNano()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[key] = slices.DeleteFunc(l.open[key], func(at int64) bool {
		if at <= began {
			l.took = append(l.took, time.Duration(now-at))
		}
		return at <= began
	})
}

// BenchmarkFeedLag shows how far a feed, and a watch, are behind b.N changes of random keys at 50 000 a second, over tcp, with cluster, writers
// and receiver in one process:
//
//	go test ./btree/kv -run '^$' -bench BenchmarkFeedLag -benchtime 500000x
//
// If the writers do not reach the rate, changes/s says so.
func BenchmarkFeedLag(b *testing.B) {
	for _, feed := range []bool{false, true} {
		b.Run(map[bool]string{false: "watch", true: "feed"}[feed], func(b *testing.B) { feedLag(b, feed) })
	}
}

func feedLag(b *testing.B, withState bool) {
	const rate, keys, writers, batch = 50_000, 10_000, 4, 64
	cluster := testcluster.New(b, testcluster.Options{Nodes: 1})
	tcp := client.Config{Transport: client.TransportTCP, Replicas: 1}
	writer, reader := cluster.Connect(tcp), cluster.Connect(tcp)
	tree, err := kv.Create(b.Context(), writer, "fed", btree.Config{})
	require.NoError(b, err)
	n := 0
	_, err = tree.Load(b.Context(), func() (key, value []byte, ok bool) {
		n++
		return fmt.Appendf(nil, "key%05d", n-1), make([]byte, 100), n <= keys
	})
	require.NoError(b, err)
	followed, err := kv.Open(b.Context(), reader, "fed", btree.Config{})
	require.NoError(b, err)
	l := &lags{open: make([][]int64, keys)}
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	synced, ended := make(chan struct{}), make(chan struct{})
	events := 0
	take := func(e kv.Event) {
		if e.Kind == kv.Synced {
			close(synced)
			return
		}
		key := 0
		_, _ = fmt.Sscanf(string(e.Key), "key%d", &key)
		l.event(key, int64(binary.LittleEndian.Uint64(e.Value)))
		events++
	}
	go func() {
		defer close(ended)
		if withState {
			receive(ctx, b, followed, take)
			return
		}
		w, err := followed.Watch(ctx, kv.WatchOptions{})
		require.NoError(b, err)
		defer w.Close()
		for e, err := w.Next(ctx); ctx.Err() == nil; e, err = w.Next(ctx) {
			if err == nil {
				take(e)
			}
		}
	}()
	<-synced
	l.mu.Lock()
	l.took = nil
	events = 0
	l.mu.Unlock()
	b.ResetTimer()
	began := time.Now()
	var wg sync.WaitGroup
	for id := range writers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(id)))
			for made := 0; made*writers < b.N; made += batch {
				time.Sleep(time.Until(began.Add(time.Duration(made) * time.Second * writers / rate)))
				ks, vs, now := make([][]byte, batch), make([][]byte, batch), time.Now().UnixNano()
				l.mu.Lock()
				for i := range ks {
					key := rng.IntN(keys/writers)*writers + id // each key has one writer
					ks[i], vs[i] = fmt.Appendf(nil, "key%05d", key), binary.LittleEndian.AppendUint64(nil, uint64(now))
					vs[i] = append(vs[i], make([]byte, 92)...)
					l.open[key] = append(l.open[key], now)
				}
				l.mu.Unlock()
				for _, err := range tree.PutMany(ctx, ks, vs) {
					require.NoError(b, err)
				}
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	b.StopTimer()
	for left := 1; left > 0 && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		l.mu.Lock()
		left = 0
		for _, open := range l.open {
			left += len(open)
		}
		l.mu.Unlock()
	}
	cancel()
	<-ended
	slices.Sort(l.took)
	b.ReportMetric(float64(len(l.took))/elapsed.Seconds(), "changes/s")
	b.ReportMetric(float64(events)/elapsed.Seconds(), "events/s")
	b.ReportMetric(float64(l.took[len(l.took)/2].Microseconds())/1000, "ms/median")
	b.ReportMetric(float64(l.took[len(l.took)*99/100].Microseconds())/1000, "ms/p99")
}

// receive takes the events of a feed, and acknowledges each batch.
func receive(ctx context.Context, b *testing.B, tree *kv.Tree, take func(kv.Event)) {
	f, err := tree.Follow(ctx, kv.FeedOptions{State: "fed.feed"})
	require.NoError(b, err)
	defer f.Close()
	for ctx.Err() == nil {
		events, err := f.Next(ctx)
		if err != nil {
			continue
		}
		for _, e := range events {
			take(e.Event)
		}
		_ = f.Ack(ctx, events[len(events)-1].Position)
	}
}
