package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// actNode is a node's end of lanes without the queue pairs.
type actNode struct {
	*host.Access
	memory *host.Memory
}

func newActNode(t *testing.T) *actNode {
	m, err := host.NewMemory("acts", 1<<16)
	require.NoError(t, err)
	n := &actNode{host.New([16]byte{1}, keyring.NewRing(), 1, 1, host.Limits{}), m}
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1, m))
	t.Cleanup(func() {
		require.NoError(t, n.Close(context.Background()))
		require.NoError(t, m.Close())
	})
	return n
}

// lane opens region 1 under its epoch in slot 3.
func (n *actNode) lane(t *testing.T, serial uint64, rights rdma.Rights, epoch uint64) (*host.Lane, uint64) {
	l, err := n.Adopt(t.Context(), &rdma.Ticket{Serial: serial, Rights: rights}, 0, 1, host.Entry{Provider: "verbs"})
	require.NoError(t, err)
	w, _, err := l.Open(1, epoch, 3)
	require.NoError(t, err)
	return l, w.Key
}

// message encodes verbs for slot 3.
func message(key uint64, verbs ...rdma.Verb) []byte {
	a := asked{make([]byte, maxAct)}
	return a.b[:a.putChain(7, 3, key, verbs)]
}

// outcome runs a message, and returns its verbs with their results, how many have run and why it stopped.
func outcome(t *testing.T, x *executor, l *host.Lane, key uint64, verbs ...rdma.Verb) (int, error) {
	t.Helper()
	b := message(key, verbs...)
	f, n, err := x.act(b, l.Run)
	require.NoError(t, err)
	f.put(x.answer, nil)
	got, err := decodeAnswered(x.answer, asked{b})
	require.NoError(t, err)
	require.Equal(t, n, actedBytes(verbs[:got.done]))
	takeResults(x.answer, verbs[:got.done])
	return got.done, got.err
}

// A message executes the verbs of a chain in their order, under the rules that hold for chains over tcp: keys, epochs, rights, bounds
// and fences. What is refused has executed nothing from that verb on.
func TestHazard158_MessagesAreExecutedUnderTheRulesOfChains(t *testing.T) {
	n, x := newActNode(t), newExecutor()
	l, key := n.lane(t, 1, rdma.ReadWrite, 1)
	image, back := bytes.Repeat([]byte{9}, 4096), make([]byte, 4096)
	verbs := []rdma.Verb{
		{Op: rdma.CompareSwap, Off: 8, Expect: 0, New: 5}, {Op: rdma.Write, Off: 4096, Buf: image}, {Op: rdma.FetchAdd, Off: 8, New: 2}, {Op: rdma.Read, Off: 4096, Buf: back},
		{Op: rdma.CompareSwap, Off: 8, Expect: 5, New: 9}, {Op: rdma.Verify, Off: 4096, Bytes: 4096, New: 3}, {Op: rdma.Flush, Bytes: 8},
	}
	done, err := outcome(t, x, l, key, verbs...)
	require.NoError(t, err)
	require.Equal(t, len(verbs), done)
	require.Equal(t, []uint64{0, 5, 7, rdma.Hash(image, 3)}, []uint64{verbs[0].Old, verbs[2].Old, verbs[4].Old, verbs[5].Old})
	require.Equal(t, image, back)
	require.Equal(t, uint64(7), binary.LittleEndian.Uint64(n.memory.Bytes()[8:]))

	reader, readKey := n.lane(t, 2, rdma.ReadOnly, 1)
	_, other := n.lane(t, 3, rdma.ReadWrite, 1)
	add := rdma.Verb{Op: rdma.FetchAdd, Off: 8, New: 1}
	for _, c := range []struct {
		lane  *host.Lane
		key   uint64
		verbs []rdma.Verb
		done  int
		err   error
	}{
		{l, key + 1, []rdma.Verb{add}, 0, rdma.ErrKey},
		{l, other, []rdma.Verb{add}, 0, rdma.ErrKey},
		{reader, readKey, []rdma.Verb{{Op: rdma.Read, Buf: back[:8]}, add}, 1, rdma.ErrReadOnly},
		{l, key, []rdma.Verb{{Op: rdma.Read, Buf: back[:8]}, {Op: rdma.FetchAdd, Off: 1 << 16, New: 1}, add}, 1, rdma.ErrBounds},
		{l, key, []rdma.Verb{{Op: rdma.FetchAdd, Off: 12, New: 1}, add}, 0, rdma.ErrAlign},
		{l, key, []rdma.Verb{{Op: rdma.Flush, Kind: rdma.Persistent, Bytes: 8}, add}, 0, rdma.ErrNotPersistent},
	} {
		done, err := outcome(t, x, c.lane, c.key, c.verbs...)
		require.ErrorIs(t, err, c.err)
		require.Equal(t, c.done, done, "%v", c.err)
	}
	// Under another epoch the old key does nothing, and a session that is fenced does nothing at all.
	require.NoError(t, n.OpenRegion(t.Context(), 1, 2, n.memory))
	_, err = outcome(t, x, l, key, add)
	require.ErrorIs(t, err, rdma.ErrKey)
	l4, key4 := n.lane(t, 4, rdma.ReadWrite, 2)
	require.NoError(t, n.Fence(t.Context(), 4))
	_, err = outcome(t, x, l4, key4, add)
	require.ErrorIs(t, err, rdma.ErrRevoked)
	require.Equal(t, uint64(7), binary.LittleEndian.Uint64(n.memory.Bytes()[8:]), "a refused chain has changed a word")
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _, _ = x.act(message2, l.Run) }))
}

var message2 = message(1, rdma.Verb{Op: rdma.FetchAdd, Off: 8, New: 1}, rdma.Verb{Op: rdma.Read, Buf: make([]byte, 64)})

// What is no message executes nothing.
func TestActForms(t *testing.T) {
	never := func(int32, uint64, []rdma.Verb) (int, error) {
		t.Error("executed")
		return 0, nil
	}
	x := newExecutor()
	good := message(5, rdma.Verb{Op: rdma.Write, Buf: make([]byte, 100)}, rdma.Verb{Op: rdma.CompareSwap, Off: 8})
	patched := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, bad := range map[string][]byte{
		"empty":                   nil,
		"head":                    good[:askedBytes],
		"short":                   good[:len(good)-1],
		"long":                    append(bytes.Clone(good), 0),
		"of another task":         patched(12, byte(taskHash)),
		"of no task":              patched(12, 3),
		"no verb":                 patched(4, 0),
		"more verbs":              patched(4, 3),
		"verbs without end":       patched(7, 0x80),
		"unknown verb":            patched(askedBytes, 99),
		"unknown flag":            patched(askedBytes+1, 0x80),
		"longer WRITE":            patched(askedBytes+5, 1),
		"an answer without room":  message(5, rdma.Verb{Op: rdma.Read, Buf: make([]byte, maxActed)}),
		"longer than any message": make([]byte, maxAct+1),
	} {
		_, _, err := x.act(bad, never)
		require.ErrorIs(t, err, errPeer, name)
	}
}

// Chains that hash or flush much have a queue of their own, whatever the form of the message.
func TestSlowChains(t *testing.T) {
	verify := func(n uint64) rdma.Verb { return rdma.Verb{Op: rdma.Verify, Bytes: n} }
	flush := func(n uint64, k rdma.FlushKind) rdma.Verb { return rdma.Verb{Op: rdma.Flush, Kind: k, Bytes: n} }
	cas, write := rdma.Verb{Op: rdma.CompareSwap, Expect: 1 << 40, New: 1 << 40}, rdma.Verb{Op: rdma.Write, Buf: make([]byte, 8000)}
	for i, c := range []struct {
		verbs []rdma.Verb
		slow  bool
	}{
		{make256(cas), false}, {[]rdma.Verb{write, write, cas}, false}, {[]rdma.Verb{cas, verify(stepBytes)}, false}, {[]rdma.Verb{cas, verify(stepBytes), verify(1)}, true},
		{[]rdma.Verb{cas, flush(stepBytes, rdma.Persistent)}, false}, {[]rdma.Verb{flush(stepBytes+1, rdma.Persistent), cas}, true}, {[]rdma.Verb{flush(1<<40, rdma.Visible), cas}, false},
		{[]rdma.Verb{flush(1<<63, rdma.Persistent), flush(1<<63, rdma.Persistent), cas}, true},
	} {
		require.Equal(t, c.slow, asked{message(1, c.verbs...)}.slow(), "case %d", i)
	}
	more := message(1, cas)
	more[7] = 0xff
	require.False(t, asked{more}.slow())
	require.False(t, asked{more[:askedBytes+5]}.slow())
}

// A chain is cut so that each message and its answer fit, and what fits in no message is left to the adapter.
func TestFitting(t *testing.T) {
	cas := rdma.Verb{Op: rdma.CompareSwap}
	long, most := rdma.Verb{Op: rdma.Write, Buf: make([]byte, maxAct)}, rdma.Verb{Op: rdma.Write, Buf: make([]byte, maxAct-askedBytes-host.VerbBytes)}
	sink, most2 := rdma.Verb{Op: rdma.Read, Buf: make([]byte, maxActed)}, rdma.Verb{Op: rdma.Read, Buf: make([]byte, maxActed-answeredBytes)}
	for i, c := range []struct {
		verbs []rdma.Verb
		n     int
	}{
		{nil, 0}, {[]rdma.Verb{cas}, 1}, {[]rdma.Verb{long, cas}, 0}, {[]rdma.Verb{cas, long, cas}, 1}, {[]rdma.Verb{most, cas}, 1}, {[]rdma.Verb{most2, cas}, 1}, {[]rdma.Verb{cas, most2}, 1},
		{[]rdma.Verb{sink}, 0}, {make256(cas), 256},
	} {
		require.Equal(t, c.n, fitting(c.verbs), "case %d", i)
		require.Equal(t, c.n == 0 && len(c.verbs) > 0, len(c.verbs) > 0 && tooLong(&c.verbs[0]), "case %d", i)
		if c.n > 0 {
			require.LessOrEqual(t, len(message(1, c.verbs[:c.n]...)), maxAct)
			require.LessOrEqual(t, actedBytes(c.verbs[:c.n]), maxActed)
		}
	}
	require.True(t, atomics([]rdma.Verb{{Op: rdma.Read}, {Op: rdma.FetchAdd}}))
	require.True(t, atomics([]rdma.Verb{cas}))
	require.False(t, atomics([]rdma.Verb{{Op: rdma.Read}, {Op: rdma.Write}, {Op: rdma.Flush}, {Op: rdma.Verify}}))
}

func make256(v rdma.Verb) []rdma.Verb {
	verbs := make([]rdma.Verb, rdma.MaxChainVerbs)
	for i := range verbs {
		verbs[i] = v
	}
	return verbs
}
