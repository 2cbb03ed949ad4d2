package state

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// large is a machine with so many regions on ten nodes, and so many sessions.
func large(t testing.TB, regions, sessions int) (*rig, []*quarrypb.Ticket) {
	r := newRig(t)
	r.settle()
	for i := range 10 {
		n := testNode(string(rune('a'+i)), "/dc/r"+string(rune('a'+i))+"/h", 1)
		n.CapacityBytes = 1 << 50
		r.up(n)
	}
	for made := 0; made < regions; made += MaxCount {
		w := r.ask(&quarrypb.CreateRegionRequest{Replicas: 3, Count: uint32(min(MaxCount, regions-made))})
		r.run()
		answerOf[*quarrypb.CreateRegionResponse](r, w)
	}
	var tickets []*quarrypb.Ticket
	for range sessions {
		w := r.ask(&quarrypb.OpenSessionRequest{Name: "program on host, pid 12345"})
		r.settle()
		tickets = append(tickets, answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket)
		delete(r.answers, w) // with its table
	}
	r.answers = map[uint64]Answer{}
	return r, tickets
}

// BenchmarkPush10000 is what it takes to tell 10 000 sessions of one changed region
// among 10 000: the decision, each session's difference and its encoding.
func BenchmarkPush10000(b *testing.B) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	r, tickets := large(b, 10000, 10000)
	records := r.records
	r.records, r.notes, r.tables = nil, nil, nil
	runtime.GC()
	runtime.ReadMemStats(&after)
	r.records = records
	rev := r.table().Revision
	for b.Loop() {
		r.ask(&quarrypb.CreateRegionRequest{Replicas: 3})
		r.run()
		pushed := 0
		for _, s := range tickets {
			w := r.ask(&quarrypb.HeartbeatRequest{Serial: s.Serial, TableRevision: rev})
			out, err := proto.Marshal(answerOf[*quarrypb.HeartbeatResponse](r, w).Table)
			require.NoError(b, err)
			pushed += len(out)
			delete(r.answers, w)
		}
		rev = r.table().Revision
		b.ReportMetric(float64(pushed)/float64(len(tickets)), "bytes/session")
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(1<<20), "MiB")
}

// TestTableOf10000 keeps the memory of a large cluster, and what a change sends to each of
// its sessions, in bounds.
func TestTableOf10000(t *testing.T) {
	if testing.Short() {
		t.Skip("fills a table with 10 000 nodes and regions; not with -short")
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	r, tickets := large(t, 10000, 10000)
	r.records, r.notes, r.tables = map[string]Record{}, nil, nil
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Less(t, (after.HeapAlloc-before.HeapAlloc)>>20, uint64(200), "MiB")
	for _, s := range tickets {
		w := r.ask(&quarrypb.HeartbeatRequest{Serial: s.Serial, TableRevision: r.rev - 1})
		a := answerOf[*quarrypb.HeartbeatResponse](r, w)
		require.Less(t, proto.Size(a), 4096, "what has changed, and not the table")
	}
	runtime.KeepAlive(r)
}

// BenchmarkBalance is one look at the primaries: of nodes that have as many as they
// should, and with one that has none and cannot take any yet, so that every replica is
// looked at.
func BenchmarkBalance(b *testing.B) {
	for _, regions := range []int{10000, 262144} {
		r, _ := large(b, regions, 0)
		look := func(b *testing.B) {
			for b.Loop() {
				r.m.balance.nextBalance = r.m.now
				r.m.balance.act()
			}
			require.Equal(b, r.m.now+int64(balanceEvery), r.m.balance.nextBalance, "all regions were looked at")
		}
		b.Run(fmt.Sprintf("%d/alike", regions), look)
		r.m.nodes[9].primary, r.m.nodes[9].refusedUntil = 0, 1<<62
		b.Run(fmt.Sprintf("%d/one-idle", regions), look)
	}
}
