package storagenode_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestExecutorEnds: a node that has executed for a region, and for which no request comes any more, gives back what it holds and closes
// its session. The next request begins anew.
func TestExecutorEnds(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{})
	cl := c.Connect(client.Config{})
	table := c.Table()
	var refs []client.Ref
	for range 150 {
		ref, err := cl.Alloc(t.Context(), make([]byte, 1000), client.AllocOptions{})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	if len(table.Regions) == 0 {
		table = c.Table()
	}
	region := table.Regions[0]
	from := &rdma.Ticket{Tenant: region.Tenant, Rights: rdma.ReadWrite}
	n, answer := c.Nodes[0], make([]byte, msg.MaxPayload)
	free := func(from *rdma.Ticket, ref client.Ref) (a msg.ObjectAnswer) {
		eventually(t, "the node has prepared", func() bool {
			q := msg.ObjectRequest{Op: msg.ObjectFree, Ref: ref, Epoch: region.Epoch, Wait: patience}
			b, err := n.Object(from, q.Append(nil), answer)
			require.NoError(t, err)
			a, err = msg.ParseObjectAnswer(answer[:b])
			require.NoError(t, err)
			return !strings.Contains(string(a.Payload), "prepares")
		})
		return a
	}
	require.Equal(t, msg.Elsewhere, free(&rdma.Ticket{Tenant: region.Tenant, Rights: rdma.ReadOnly}, refs[0]).Reason)
	require.Equal(t, msg.Elsewhere, free(&rdma.Ticket{Tenant: region.Tenant, Rights: rdma.ReadWrite, Region: region.Id + 1, Epoch: 1}, refs[0]).Reason)
	sessions := func() (count int) {
		res, err := c.Control().ListSessions(t.Context(), connect.NewRequest(&quarrypb.ListSessionsRequest{}))
		require.NoError(t, err)
		for _, s := range res.Msg.Sessions {
			if strings.HasPrefix(s.Name, "procedures of region") {
				count++
			}
		}
		return count
	}
	require.Zero(t, sessions(), "refused requests begin nothing")
	for _, ref := range refs[:149] {
		require.Equal(t, msg.Done, free(from, ref).Outcome)
	}
	require.Equal(t, 1, sessions())
	n.Forget()
	eventually(t, "the session is closed", func() bool { return sessions() == 0 })
	require.NoError(t, cl.Close())
	rep, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{c.Controller.URL()}})
	require.NoError(t, err)
	require.True(t, rep.OK(), "%+v", rep.Findings)
	require.Equal(t, msg.Done, free(from, refs[149]).Outcome)
	require.EqualValues(t, 150, n.Stats().Executed.Done)
}
