package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// A rotation waits for every node that is up, goes on under the next leader, and ends with the
// last session of before.
func TestRotation(t *testing.T) {
	r := newRig(t)
	register := func() { // and let no heartbeat follow but those below
		for _, name := range []string{"a", "b"} {
			w := r.join(testNode(name, "/dc/"+name+"/h", 1))
			r.settle()
			answerOf[*quarrypb.RegisterNodeResponse](r, w)
		}
	}
	register()
	before := r.m.keys.current
	old := r.open("old")
	proof := r.m.Credentials().proof(old.Serial)
	states := func() (out []string) {
		for _, k := range answerOf[*quarrypb.KeysResponse](r, r.ask(&quarrypb.ListKeysRequest{})).Keys {
			out = append(out, k.State)
		}
		return out
	}
	beat := func(node uint32, ids ...uint64) *quarrypb.NodeHeartbeatResponse {
		return answerOf[*quarrypb.NodeHeartbeatResponse](r, r.ask(&quarrypb.NodeHeartbeatRequest{Id: node, Incarnation: 1, KeyIds: ids}))
	}
	require.Empty(t, beat(1, before.ID()).Keys, "it has them")
	r.ask(&quarrypb.RotateKeyRequest{})
	r.settle()
	next := r.m.keys.next
	require.Equal(t, []string{"next", "current"}, states())
	require.Equal(t, Precondition, r.refusal(r.ask(&quarrypb.RotateKeyRequest{})).Code)
	require.Len(t, beat(1, before.ID()).Keys, 2, "it learns the next one")
	beat(1, before.ID(), next.ID())
	pass := func() {
		r.now += rotateEvery
		r.step(Tick{})
		r.settle()
	}
	pass()
	require.Equal(t, []string{"next", "current"}, states(), "node b has not learned it")
	require.Equal(t, before.ID(), r.m.Credentials().Signer.ID())

	r.start() // another leader
	r.settle()
	register()
	beat(1, before.ID(), next.ID())
	pass()
	require.Equal(t, []string{"next", "current"}, states(), "the next leader waits for node b too")
	beat(2, before.ID(), next.ID())
	pass()
	require.Equal(t, []string{"current", "previous"}, states())
	require.Equal(t, next.ID(), r.m.Credentials().Signer.ID())
	require.Equal(t, next.ID(), r.open("new").KeyId)
	require.Equal(t, proof, r.m.Credentials().proof(old.Serial), "what a session was given stays good")
	pass()
	require.Equal(t, []string{"current", "previous"}, states(), "a session of before lives")
	require.Equal(t, Precondition, r.refusal(r.ask(&quarrypb.RotateKeyRequest{})).Code)
	r.ask(&quarrypb.CloseSessionRequest{Serial: old.Serial})
	r.settle()
	r.now += lateProofs // since the leader began: the one before may have renewed a ticket
	pass()
	require.Equal(t, []string{"current"}, states())
	require.Len(t, beat(1, before.ID(), next.ID()).Keys, 1, "nodes drop it")
}

// TestRotationRenewsTickets: the answer to a heartbeat that shows a ticket signed by the previous key has
// a ticket signed by the current key, for the same session and holder. The previous key is dropped when
// every session uses such a ticket and lateProofs has passed.
func TestRotationRenewsTickets(t *testing.T) {
	r := newRig(t)
	long, other := r.open("long"), r.open("other")
	before := r.m.keys.current
	r.ask(&quarrypb.RotateKeyRequest{})
	r.settle()
	pass := func(d int64) {
		r.now += d
		r.step(Tick{})
		r.settle()
	}
	pass(rotateEvery)
	current := r.m.keys.current
	require.NotEqual(t, before.ID(), current.ID())
	beat := func(q *quarrypb.HeartbeatRequest) *quarrypb.HeartbeatResponse {
		return answerOf[*quarrypb.HeartbeatResponse](r, r.ask(q))
	}
	serial := long.Serial
	res := beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: long.KeyId})
	require.Equal(t, current.ID(), res.KeyId, "the session learns that another key signs")
	require.Nil(t, res.Ticket)

	forged := proto.CloneOf(long)
	forged.Holder = make([]byte, len(forged.Holder))
	bound := rdma.Ticket{Session: long.Session, Serial: serial, Rights: rdma.ReadWrite, Holder: publicKey, Region: 1, Epoch: 1}
	bound.Sign(before)
	for name, bad := range map[string]*quarrypb.Ticket{"of another session": other, "with another holder": forged, "of a reconcile": bound.Proto(), "empty": {}} {
		res := beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: long.KeyId, Ticket: bad})
		require.Nil(t, res.Ticket, name)
		require.Nil(t, res.Proof, name)
	}
	res = beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: long.KeyId, Ticket: long})
	renewed, err := rdma.TicketOf(res.Ticket)
	require.NoError(t, err)
	require.True(t, renewed.Verify(keyring.NewRing(current.Public())))
	want, err := rdma.TicketOf(long)
	require.NoError(t, err)
	want.KeyID, want.Signature = renewed.KeyID, renewed.Signature
	require.Equal(t, want, renewed, "all but the signature is as before")

	beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: renewed.KeyID, Proof: res.Proof})
	beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: renewed.KeyID}) // the former proof, of a call that was late
	r.ask(&quarrypb.CloseSessionRequest{Serial: other.Serial})
	r.settle()
	pass(rotateEvery)
	require.NotNil(t, r.m.keys.previous, "calls with the former proof may be under way")
	pass(lateProofs)
	require.Nil(t, r.m.keys.previous)
	beat(&quarrypb.HeartbeatRequest{Serial: serial, KeyId: renewed.KeyID, Proof: res.Proof})
	require.Equal(t, stateLive, r.m.session(serial).rec.State)
}
