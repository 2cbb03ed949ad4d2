package kv_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// BenchmarkWatch shows how long behind the end of a Put over tcp its event comes, beside a READ over tcp, of an object's watch
// and of a tree's: medians, in one process.
func BenchmarkWatch(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{Nodes: 1})
	writer, reader := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 1}), cluster.Connect(client.Config{Transport: client.TransportTCP})
	tree, err := kv.Create(b.Context(), writer, "watched", btree.Config{})
	require.NoError(b, err)
	for i := range 1000 {
		require.NoError(b, tree.Put(b.Context(), fmt.Appendf(nil, "key%04d", i), make([]byte, 100)))
	}
	watched, err := kv.Open(b.Context(), reader, "watched", btree.Config{})
	require.NoError(b, err)
	w, err := watched.Watch(b.Context(), kv.WatchOptions{From: kv.From{Now: true}})
	require.NoError(b, err)
	defer w.Close()
	_, err = w.Next(b.Context()) // Synced
	require.NoError(b, err)
	ref, err := writer.Alloc(b.Context(), make([]byte, 100), client.AllocOptions{})
	require.NoError(b, err)
	object, err := reader.Watch(b.Context(), ref)
	require.NoError(b, err)
	defer object.Close()
	var reads, ofKeys, ofObject []time.Duration
	took := func(list *[]time.Duration, f func() error) {
		began := time.Now()
		require.NoError(b, f())
		*list = append(*list, time.Since(began))
	}
	var buf []byte
	for i := 0; b.Loop(); i++ {
		require.NoError(b, tree.Put(b.Context(), fmt.Appendf(nil, "key%04d", i*7%1000), make([]byte, 100)))
		took(&ofKeys, func() error { _, err := w.Next(b.Context()); return err })
		require.NoError(b, writer.Write(b.Context(), ref, make([]byte, 100)))
		took(&ofObject, func() (err error) { buf, _, err = object.Next(b.Context(), buf[:0]); return err })
		took(&reads, func() (err error) { buf, err = reader.Read(b.Context(), ref, buf[:0]); return err })
	}
	for name, list := range map[string][]time.Duration{"read": reads, "key": ofKeys, "object": ofObject} {
		slices.Sort(list)
		b.ReportMetric(float64(list[len(list)/2].Microseconds()), "us/"+name)
	}
}

// BenchmarkIdleWatch shows what watches cost while nothing changes: the processor time of the whole process, cluster and
// clients, in percent of one core, without and with 10 000 watched objects.
func BenchmarkIdleWatch(b *testing.B) {
	cluster := testcluster.New(b, testcluster.Options{Nodes: 1, RegionBytes: 1 << 30})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP, Replicas: 1})
	w, err := c.NewWatcher()
	require.NoError(b, err)
	defer w.Close()
	processor := func() time.Duration {
		var u unix.Rusage
		require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	share := func() float64 {
		const quiet = 10 * time.Second
		time.Sleep(2 * time.Second)
		before := processor()
		time.Sleep(quiet)
		return 100 * float64(processor()-before) / float64(quiet)
	}
	for b.Loop() {
		without := share()
		for i := range 10_000 {
			ref, err := c.Alloc(b.Context(), make([]byte, 100), client.AllocOptions{})
			require.NoError(b, err)
			if i == 9_999 {
				err = w.Add(b.Context(), ref, 1)
			} else {
				err = w.Expect(b.Context(), ref, 1)
			}
			require.NoError(b, err)
		}
		b.ReportMetric(without, "%/idle")
		b.ReportMetric(share(), "%/watched")
	}
}
