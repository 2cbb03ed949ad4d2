package msg_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

var someRef = proto.Ref{Addr: proto.MakeAddr(3, 0x100000), Incarnation: proto.MakeIncarnation(2, 9)}

// What is encoded is decoded as it was.
func TestObjectsAndWorkersAreDecoded(t *testing.T) {
	for _, q := range []msg.ObjectRequest{
		{Op: msg.ObjectRead, Turn: true, Wait: 50 * time.Millisecond, Ref: someRef, Epoch: 7, Payload: []byte{}},
		{Op: msg.ObjectWrite, Ref: someRef, Epoch: 7, Version: 5, Named: 11, Payload: make([]byte, msg.MaxObjectPayload)},
		{Op: msg.ObjectCall, Wait: time.Second, Ref: someRef, Epoch: 1, Payload: msg.AppendFunction(nil, "add", []byte("2"))},
	} {
		b := q.Append(nil)
		require.LessOrEqual(t, len(b), msg.MaxPayload)
		got, err := msg.ParseObject(b)
		require.NoError(t, err)
		require.Equal(t, q, got)
	}
	buf := make([]byte, msg.MaxPayload)
	for _, a := range []msg.ObjectAnswer{
		{Outcome: msg.NotDone, Reason: msg.Conflict, Has: true, Others: true, Tag: 4, Version: 6, Turn: 8, Payload: append(msg.Room(buf), "payload"...)},
		{Outcome: msg.Unknown, Payload: []byte{}},
	} {
		got, err := msg.ParseObjectAnswer(buf[:a.Put(buf)])
		require.NoError(t, err)
		require.Equal(t, a, got)
	}
	for _, r := range []msg.WorkerRequest{
		{Op: msg.WorkerOffer, Place: 9, Any: true, Names: []string{"add", "insert"}},
		{Op: msg.WorkerTake, Place: 9, Wait: 20 * time.Second},
		{Op: msg.WorkerGive, Place: 9, Call: 3, Outcome: msg.NotDone, Reason: msg.Failed, Answer: []byte("why")},
	} {
		got, err := msg.ParseWorker(r.Append(nil))
		require.NoError(t, err)
		require.Equal(t, r, got)
	}
	taken := msg.Taken{Call: 3, Within: 700 * time.Millisecond, Ref: someRef, Function: "add", Args: make([]byte, msg.MaxFunctionArgs)}
	got, ok, err := msg.ParseTaken(buf[:taken.Put(buf)])
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, taken, got)
}

// The names that fit are as many as an offer has room for, and no more.
func TestNamesThatFit(t *testing.T) {
	for _, length := range []int{1, 20, 31, 32, 40, msg.MaxFunctionName} {
		names := slices.Repeat([]string{strings.Repeat("n", length)}, 200)
		n := msg.NamesThatFit(names)
		size := func(n int) int { return len((&msg.WorkerRequest{Op: msg.WorkerOffer, Names: names[:n]}).Append(nil)) }
		require.LessOrEqual(t, size(n), msg.MaxPayload)
		require.True(t, n == msg.MaxFunctionNames || size(n+1) > msg.MaxPayload, "%d of %d bytes", n, length)
	}
	require.Equal(t, 2, msg.NamesThatFit([]string{"add", "insert"}))
}

// A node indexes by what it decodes, so what no correct client sends is refused.
func TestHostileObjectsAndWorkers(t *testing.T) {
	good := msg.ObjectRequest{Op: msg.ObjectRead, Ref: someRef, Epoch: 7}
	give := msg.WorkerRequest{Op: msg.WorkerGive, Place: 9, Call: 3, Outcome: msg.Done, Answer: []byte("x")}
	for what, b := range map[string][]byte{
		"operation 0": set(good.Append(nil), 0, 0), "operation 6": set(good.Append(nil), 0, 6), "an unknown flag": set(good.Append(nil), 1, 2), "a read with a payload": append(good.Append(nil), 1), "nothing": nil,
	} {
		_, err := msg.ParseObject(b)
		require.ErrorIs(t, err, msg.ErrFormat, what)
	}
	for what, b := range map[string][]byte{
		"operation 4": set(give.Append(nil), 0, 4), "outcome 3": set(give.Append(nil), 17, 3), "reason 14": set(give.Append(nil), 18, byte(msg.Failed)+1),
		"a long answer": append(give.Append(nil), make([]byte, msg.MaxFunctionAnswer)...), "a name without its end": {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 'a'}, "an empty name": {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"a take without its time": {2, 0, 0, 0, 0, 0, 0, 0, 0}, "nothing": nil,
	} {
		_, err := msg.ParseWorker(b)
		require.ErrorIs(t, err, msg.ErrFormat, what)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		b := make([]byte, rng.IntN(200))
		for i := range b {
			b[i] = byte(rng.IntN(8))
		}
		_, _ = msg.ParseObject(b)
		_, _ = msg.ParseObjectAnswer(b)
		if r, err := msg.ParseWorker(b); err == nil {
			require.LessOrEqual(t, r.Reason, msg.Failed)
			require.LessOrEqual(t, r.Outcome, msg.Unknown)
		}
		_, _, _ = msg.ParseFunction(b)
		_, _, _ = msg.ParseTaken(b)
	}
}

func set(b []byte, at int, to byte) []byte {
	b[at] = to
	return b
}
