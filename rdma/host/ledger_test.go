package host

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/stretchr/testify/require"
)

// onLedger runs verbs in a chain on memory whose losses of power show.
func onLedger(t *testing.T) (*Memory, *pmem.Ledger, func(verbs ...rdma.Verb)) {
	m, ledger, err := NewLedgerMemory("ledger", 1<<20)
	require.NoError(t, err)
	t.Cleanup(func() { m.Close() })
	a := New(testCluster, testKeys, 1, 1, Limits{})
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	t.Cleanup(func() { a.CloseRegion(t.Context(), 1, 1) })
	l := admit(t, a, 1, 0)
	w, _, err := l.Open(1, 1, 0)
	require.NoError(t, err)
	return m, ledger, func(verbs ...rdma.Verb) {
		done, err := l.Run(0, w.Key, verbs)
		require.NoError(t, err)
		require.Len(t, verbs, done)
	}
}

// A loss of power after a chain keeps what the chain has flushed, whatever the verb and the length, and
// may lose what it has not.
func TestFlushedVerbsSurviveALossOfPower(t *testing.T) {
	const at, word = 4096, 7
	number := binary.LittleEndian.AppendUint64(nil, word)
	for name, verb := range map[string]rdma.Verb{
		"WRITE":                {Op: rdma.Write, Off: at, Buf: number},
		"CAS":                  {Op: rdma.CompareSwap, Off: at, New: word},
		"FETCH_ADD":            {Op: rdma.FetchAdd, Off: at, New: word},
		"WRITE of bytes":       {Op: rdma.Write, Off: at + 3, Buf: []byte("seventeen bytes..")},
		"long WRITE":           {Op: rdma.Write, Off: at, Buf: bytes.Repeat(number, 2000)},
		"long WRITE unaligned": {Op: rdma.Write, Off: at + 5, Buf: bytes.Repeat(number, 2000)},
	} {
		t.Run(name, func(t *testing.T) {
			m, ledger, run := onLedger(t)
			before := ledger.Cut(pmem.None)
			run(verb)
			if name != "long WRITE" { // which goes past the caches
				require.Equal(t, before, ledger.Cut(pmem.None), "nothing was flushed")
			}
			require.Equal(t, m.Bytes(), ledger.Cut(pmem.All))
			verb.Expect = word // so that a CAS changes nothing
			n := verb.Len()
			run(rdma.Verb{Op: rdma.Flush, Kind: rdma.Visible, Off: verb.Off, Bytes: n})
			if name != "long WRITE" {
				require.Equal(t, before, ledger.Cut(pmem.None), "a flush that is not persistent")
			}
			run(rdma.Verb{Op: rdma.Flush, Kind: rdma.Persistent, Off: verb.Off, Bytes: n})
			require.Equal(t, m.Bytes(), ledger.Cut(pmem.None))
		})
	}
}

// The header and the zeros that a node writes itself are flushed too.
func TestZeroSurvivesALossOfPower(t *testing.T) {
	m, ledger, run := onLedger(t)
	run(rdma.Verb{Op: rdma.Write, Off: 70, Buf: bytes.Repeat([]byte{1}, 10000)}, rdma.Verb{Op: rdma.Flush, Kind: rdma.Persistent, Off: 70, Bytes: 10000})
	require.NoError(t, m.Zero(64))
	require.Equal(t, make([]byte, 1<<20), ledger.Cut(pmem.None))
}

// The persist path allocates nothing.
func TestFlushAllocatesNothing(t *testing.T) {
	m, _, _ := onLedger(t)
	m.flush = pmem.Flusher{} // the lane above keeps the ledger's; it is not used here
	page, err := mapPage(nil)
	require.NoError(t, err)
	r, err := NewRunner(page, rdma.ReadWrite)
	require.NoError(t, err)
	for _, f := range pmem.Flushers() {
		r.page.keys[0] = 7
		r.Map(0, 7, m.Bytes(), f)
		verbs := []rdma.Verb{
			{Op: rdma.Write, Off: 4096, Buf: make([]byte, 4096)},
			{Op: rdma.CompareSwap, Off: 64, Expect: 0, New: 0},
			{Op: rdma.Flush, Kind: rdma.Persistent, Off: 64, Bytes: 8},
			{Op: rdma.Flush, Kind: rdma.Persistent, Off: 4096, Bytes: 4096},
		}
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if _, err := r.Run(0, 7, verbs); err != nil {
				t.Fatal(err)
			}
		}), "%v", f.Way())
	}
}
