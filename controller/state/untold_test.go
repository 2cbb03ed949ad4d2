package state

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A node that hosted nothing was not waited for. What a new leader answers to its
// registration may be lost: it is told of every fence again before it opens a region.
// (Found by the simulator: a node obeyed with its registration half done.)
func TestANodeIsToldOfEveryFenceBeforeItOpensARegion(t *testing.T) {
	r := cluster(t)
	r.up(testNode("c", "/dc/r3/h", 1))
	dead := r.open("dead")
	w := r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
	r.settle()
	onC := func(c Call) bool { return c.Node == 3 }
	r.answerAll(onC)
	answerOf[*quarrypb.RevokeSessionResponse](r, w) // fenced, and c does not know

	r.start()
	for _, n := range []*quarrypb.Node{testNode("a", "/dc/r1/a", 1), testNode("b", "/dc/r2/b", 1), testNode("c", "/dc/r3/h", 1)} {
		w := r.join(n)
		r.settle()
		r.joined(w, n)
	}
	w = r.ask(&quarrypb.CreateRegionRequest{Replicas: 3})
	told := func(c Call) bool {
		f, ok := c.Msg.(*quarrypb.FenceRequest)
		return ok && c.Node == 3 && slices.Contains(f.Serials, dead.Serial)
	}
	r.answerAll(told)
	require.False(t, r.answered(w), "c has not said that it knows")
	r.answerAll(none)
	answerOf[*quarrypb.CreateRegionResponse](r, w)
}
