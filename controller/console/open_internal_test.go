package console

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// asked is a controller of one node that counts what it is asked.
type asked struct {
	quarrypbconnect.UnimplementedControllerHandler
	status, inspect int
	maps            int // of them, those that want the map of a region
}

func (a *asked) Status(context.Context, *connect.Request[quarrypb.StatusRequest]) (*connect.Response[quarrypb.StatusResponse], error) {
	a.status++
	return connect.NewResponse(&quarrypb.StatusResponse{Table: &quarrypb.Table{Nodes: []*quarrypb.Node{{Id: 1, Name: "n1", State: quarrypb.NodeState_NODE_STATE_UP}}}}), nil
}

func (a *asked) InspectNode(_ context.Context, r *connect.Request[quarrypb.InspectNodeRequest]) (*connect.Response[quarrypb.InspectNodeResponse], error) {
	a.inspect++
	if r.Msg.MapOf != nil {
		a.maps++
	}
	return connect.NewResponse(&quarrypb.InspectNodeResponse{}), nil
}

// TestNodesAreAskedForAnOpenPageOnly: without a page, each controller's console would cost every node a call.
func TestNodesAreAskedForAnOpenPageOnly(t *testing.T) {
	a, jobs := &asked{}, 0
	_, handler := quarrypbconnect.NewControllerHandler(a)
	s := httptest.NewServer(handler)
	defer s.Close()
	c := New(Config{Jobs: func(context.Context, []string) ([]Job, error) { jobs++; return []Job{{ID: 7}}, nil }})
	c.urls = []string{s.URL}

	require.False(t, c.open())
	c.gather(t.Context(), c.open())
	require.Equal(t, []int{1, 0, 0}, []int{a.status, a.inspect, jobs})
	require.Empty(t, c.snap.Error)
	require.Equal(t, "up", c.snap.Nodes[0].State, "what events are made of")
	require.False(t, c.snap.Nodes[0].Asked)

	w := httptest.NewRecorder()
	c.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/console/state", nil))
	require.Equal(t, http.StatusOK, w.Code)
	require.True(t, c.open())
	require.Len(t, c.look, 1, "the page need not wait until the next look is due")
	c.gather(t.Context(), c.open())
	require.Equal(t, []int{2, 1, 1}, []int{a.status, a.inspect, jobs})
	require.Zero(t, a.maps, "a look at the page has no node count its slabs")
	require.True(t, c.snap.Nodes[0].Asked)
	require.True(t, c.snap.Nodes[0].Answers)
	require.Len(t, c.snap.Jobs, 1)
}
