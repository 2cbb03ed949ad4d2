package flight_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// rounds are those of some clients.
func rounds(clients ...*client.Client) (sum uint64) {
	for _, c := range clients {
		for _, k := range c.Stats().Kinds {
			sum += k.Rounds
		}
	}
	return sum
}

// A stream of many batches is one scan: it takes no more rounds than one.
func TestRoundsOfAStream(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	for _, size := range []int{100, 1000} { // in the leaves, and outside of them
		name := fmt.Sprint("tree ", size)
		tree := w.tree(name, 4000, size)
		s, addr := w.serve(flight.Config{BatchRows: 100})
		c := dial(t, addr)
		info, err := c.GetFlightInfo(t.Context(), command(t, flight.Request{Tree: name, Parts: 1}))
		require.NoError(t, err)
		rowsOf(t, t.Context(), c, info.Endpoint[0].Ticket.Ticket) // the session learns the tree
		scan := func() uint64 {
			before := rounds(w.c)
			scanned(t, tree, btree.Range{})
			return rounds(w.c) - before
		}
		scan()
		before := rounds(w.callers...)
		require.Len(t, rowsOf(t, t.Context(), c, info.Endpoint[0].Ticket.Ticket), 4000)
		require.Less(t, rounds(w.callers...)-before, scan()+10, "40 batches; some rounds look at the tree, or at its region again")
		require.EqualValues(t, 8000, s.Stats().RowsRead)
	}
}

// Streams for which there is too little memory take turns, and each gives the whole range.
func TestStreamsTakeTurns(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 64 << 20})
	tree := w.tree("users", 3000, 500)
	s, addr := w.serve(flight.Config{MemoryBytes: 140 << 20, BatchBytes: 32 << 20, BatchRows: 50}) // for two batches
	info, err := dial(t, addr).GetFlightInfo(t.Context(), command(t, flight.Request{Tree: "users", Parts: 1}))
	require.NoError(t, err)
	want := without(scanned(t, tree, btree.Range{}), true)
	var streams sync.WaitGroup
	got, errs := make([][]row, 5), make([]error, 5)
	for i := range got {
		c := dial(t, addr)
		streams.Go(func() {
			errs[i] = get(t.Context(), c, info.Endpoint[0].Ticket.Ticket, func(b arrow.RecordBatch) { got[i] = append(got[i], rowsOfBatch(b)...) })
		})
	}
	streams.Wait()
	for i := range got {
		require.NoError(t, errs[i])
		require.Equal(t, want, got[i])
	}
	require.Eventually(t, func() bool { return s.Stats().MemoryBytes == 0 }, patience, tick)
}

// A stream that finds no memory for its next batch ends its scan, and waits without what the scan has read ahead.
func TestScanEndsWithoutMemory(t *testing.T) {
	w := newWorld(t, testcluster.Options{})
	s, _ := w.serve(flight.Config{})
	more, err := s.TurnWithoutMemory(t.Context())
	require.NoError(t, err)
	require.False(t, more)
	require.Zero(t, s.Stats().MemoryBytes)
}

// What a batch allocates does not depend on its rows.
func TestAllocationsOfAMessage(t *testing.T) {
	few, many := flight.AllocationsOfMessage(64<<10), flight.AllocationsOfMessage(1<<20)
	require.InDelta(t, few, many, 4, "1000 rows and 64") // the race detector takes from pools
	require.LessOrEqual(t, many, 80.0)
}

// A put that is broken off in the middle of a batch, and sent again as a whole, gives the tree that it would have given.
func TestPutAgainFromTheMiddle(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 256 << 20})
	tree := w.tree("users", 100, 10)
	const n = 20_000
	broken := 0
	for try := 0; broken == 0; try++ {
		require.Less(t, try, 100, "no put was broken off in its batch")
		var rows []row
		for i := range n {
			rows = append(rows, row{key: string(keyOf(i)), value: fmt.Sprint("put ", i, " of ", try)})
		}
		s, addr := w.serve(flight.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := put(ctx, dial(t, addr), "users", binarySchema, batchOf(rows...))
			done <- err
		}()
		for s.Stats().RowsPut == 0 {
			select {
			case err := <-done:
				require.NoError(t, err, "it is to be broken off by this test")
				done <- nil
			default:
			}
		}
		cancel()
		<-done
		require.Eventually(t, func() bool { return s.Stats().Calls == 1 }, patience, tick)
		if put := s.Stats().RowsPut; put > 0 && put < n {
			broken++
		}
		_, other := w.serve(flight.Config{})
		acks, err := put(t.Context(), dial(t, other), "users", binarySchema, batchOf(rows...))
		require.NoError(t, err)
		require.Equal(t, []flight.PutResult{{Batch: 1, Puts: n, Total: n}}, acks)
		require.Equal(t, rows, without(scanned(t, tree, btree.Range{}), true))
	}
}

// Clients with DialOptions get what others get, largest entries among them.
func TestDialOptions(t *testing.T) {
	w := newWorld(t, testcluster.Options{RegionBytes: 256 << 20})
	tree := w.tree("users", 3000, 100)
	require.NoError(t, tree.Put(t.Context(), []byte("k000100big"), make([]byte, 9<<20)))
	_, addr := w.serve(flight.Config{})
	c, err := arrowflight.NewClientWithMiddleware(addr, nil, nil, append(flight.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	require.NoError(t, err)
	defer c.Close()
	require.Equal(t, without(scanned(t, tree, btree.Range{}), true), all(t, t.Context(), c, path("users")))
	_, err = put(t.Context(), c, "users", binarySchema, batchOf(row{key: "a", value: "1"}))
	require.NoError(t, err)
}

// A message is decoded with one copy however it comes in pieces, and its body is aligned. Others are left to package proto.
func TestDecode(t *testing.T) {
	whole := &arrowflight.FlightData{DataHeader: []byte("the header"), AppMetadata: []byte("metadata"), DataBody: bytes.Repeat([]byte("body"), 100)}
	b, err := proto.Marshal(whole)
	require.NoError(t, err)
	for cut := range len(b) + 1 {
		d, ok := flight.DecodeData(b[:cut], b[cut:])
		require.True(t, ok)
		require.True(t, proto.Equal(whole, d))
		if cut > len(b)-len(whole.DataBody) {
			require.Zero(t, flight.Misaligned(d.DataBody))
		}
		if cut < len(b) {
			d, ok = flight.DecodeData(b[:cut])
			wrong := &arrowflight.FlightData{}
			require.Equal(t, proto.Unmarshal(b[:cut], wrong) == nil, ok)
			require.True(t, !ok || proto.Equal(wrong, d))
		}
	}
	for _, other := range [][]byte{append(bytes.Clone(b), b...), append([]byte{0x78, 1}, b...), {0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}} {
		_, ok := flight.DecodeData(other)
		require.False(t, ok)
	}
}

// What is decoded with one copy is what package proto makes of it.
func FuzzDecode(f *testing.F) {
	b, err := proto.Marshal(&arrowflight.FlightData{DataHeader: []byte("header"), DataBody: []byte("body")})
	require.NoError(f, err)
	f.Add(b, 3)
	f.Add([]byte{0xc2, 0x3e, 0}, 1)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		cut = min(max(cut, 0), len(b))
		d, ok := flight.DecodeData(b[:cut], b[cut:])
		if !ok {
			return
		}
		want := &arrowflight.FlightData{}
		require.NoError(t, proto.Unmarshal(b, want))
		require.True(t, proto.Equal(want, d))
	})
}
