package flight_test

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// BenchmarkRead reads the same bytes in three ways, over tcp and shm: objects by ReadMany, a tree by Scan, and by DoGet of one stream, with large values
// (1 KiB, in objects of their own) and small ones (in the leaves). The client's window has room for some batches, so that the figure is not that of a
// busy machine's scheduler. With -count the three take turns. cpu-ns/B is the processor time of client, server and node together for a byte, which says
// more than the rate where other programs run:
//
//	go test ./gateway/flight -run '^$' -bench BenchmarkRead/tcp -benchtime 20x -count 5
func BenchmarkRead(b *testing.B) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		for name, size := range map[string]int{"1KiB": 1 << 10, "200B": 200} {
			const n = 20_000
			cluster := testcluster.New(b, testcluster.Options{RegionBytes: 256 << 20})
			w := &world{Cluster: cluster, t: b, c: cluster.Connect(client.Config{Transport: transport}), transport: transport}
			tree := w.tree("users", n, size)
			total := int64(n * (size + 10))
			b.Run(transport+"/"+name+"/ReadMany", func(b *testing.B) {
				payloads := make([][]byte, n)
				for i := range payloads {
					payloads[i] = valueOf(i, size)
				}
				refs, errs := w.c.AllocMany(b.Context(), payloads, client.AllocOptions{})
				for _, err := range errs {
					require.NoError(b, err)
				}
				defer processorTime(b, total)()
				for b.Loop() {
					require.NoError(b, w.c.ReadMany(b.Context(), refs, func(int, []byte, error) {}))
				}
			})
			b.Run(transport+"/"+name+"/Scan", func(b *testing.B) {
				defer processorTime(b, total)()
				for b.Loop() {
					require.NoError(b, tree.Scan(b.Context(), btree.Range{}, func([]byte, []byte, uint64) bool { return true }))
				}
			})
			_, addr := w.serve(flight.Config{})
			c := dial(b, addr, flight.DialOptions()...)
			info, err := c.GetFlightInfo(b.Context(), command(b, flight.Request{Tree: "users", Parts: 1}))
			require.NoError(b, err)
			b.Run(transport+"/"+name+"/DoGet", func(b *testing.B) {
				defer processorTime(b, total)()
				for b.Loop() {
					rows := int64(0)
					require.NoError(b, get(b.Context(), c, info.Endpoint[0].Ticket.Ticket, func(r arrow.RecordBatch) { rows += r.NumRows() }))
					require.EqualValues(b, n, rows)
				}
			})
		}
	}
}

// processorTime measures a loop over bytes. It is called before the loop, and what it returns behind.
func processorTime(b *testing.B, bytes int64) func() {
	b.SetBytes(bytes)
	used := func() int64 {
		var u unix.Rusage
		require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return u.Utime.Nano() + u.Stime.Nano()
	}
	began := used()
	return func() { b.ReportMetric(float64(used()-began)/float64(int64(b.N)*bytes), "cpu-ns/B") }
}
