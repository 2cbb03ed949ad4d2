package state

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
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
	pass()
	require.Equal(t, []string{"current"}, states())
	require.Len(t, beat(1, before.ID(), next.ID()).Keys, 1, "nodes drop it")
}
