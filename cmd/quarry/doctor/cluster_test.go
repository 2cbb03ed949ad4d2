package doctor

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/rail"
)

// service answers /healthz as one of a version whose wall clock is off.
func service(t *testing.T, version string, status int, off time.Duration) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(VersionHeader, version)
		w.Header().Set("Date", time.Now().Add(off).UTC().Format(http.TimeFormat))
		w.WriteHeader(status)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestClusterThatIsWell(t *testing.T) {
	agent := service(t, "v1", 200, 0)
	c := Cluster{Version: "v1", Controllers: []string{service(t, "v1", 200, 0), service(t, "v1", 200, 0), service(t, "v1", 200, 0)},
		Status: &quarrypb.StatusResponse{Table: &quarrypb.Table{
			Nodes: []*quarrypb.Node{{Id: 1, Name: "n1", State: quarrypb.NodeState_NODE_STATE_UP, AgentUrl: agent, FailureDomain: "/a/b/c",
				Persistence: &quarrypb.Persistence{Kind: "devdax", Domain: "memory_controller", Flush: "clwb", Method: "appliance", Ddio: "off"},
				Endpoints:   []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: strings.TrimPrefix(agent, "http://")}, {Provider: quarrypb.Provider_PROVIDER_SHM, Address: "/not/looked/at"}}}},
			Regions: []*quarrypb.Region{{Id: 1, State: quarrypb.RegionState_REGION_STATE_OPEN, WantReplicas: 1, Replicas: []*quarrypb.Replica{{Node: 1, State: quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC}}}},
		}}}
	list := c.Check(t.Context())
	require.Equal(t, OK, Worst(list), "%+v", list)
	require.Contains(t, list, ok("durability", "n1: regions on devdax are flushed by clwb, for clients: appliance, DDIO is off"))
}

// TestRails: the doctor says by which rail of this process a node is reached, and warns where there is none.
func TestRails(t *testing.T) {
	node := func(rails ...string) *quarrypb.Node {
		n := &quarrypb.Node{Name: "n1"}
		for _, r := range rails {
			n.Endpoints = append(n.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Address: "host-" + r + ":1", Rail: r})
		}
		return n
	}
	c := Cluster{Rails: []rail.Own{{Name: "b"}}}
	require.Equal(t, []Finding{ok("rails", "n1 is reached at host-b:1, b; ways by the rails of this process: 1")}, c.rails(node("a", "b")))
	require.Equal(t, []Finding{ok("rails", "n1 is reached at host-:1, no named rail; ways by the rails of this process: 1")}, c.rails(node("a", "")))
	require.Equal(t, Warning, Worst(c.rails(node("a", "c"))))
	require.Empty(t, c.rails(node()), "no tcp")
	require.Empty(t, Cluster{}.rails(node("a")), "this process has named no rail")
}

func TestClusterThatIsNot(t *testing.T) {
	gone, one := "http://127.0.0.1:1", uint32(1)
	replica := func(s quarrypb.ReplicaState) []*quarrypb.Replica { return []*quarrypb.Replica{{Node: 1, State: s}} }
	c := Cluster{Version: "v2", Controllers: []string{service(t, "v1", 200, time.Hour), service(t, "v1", http.StatusServiceUnavailable, 0), gone},
		Status: &quarrypb.StatusResponse{
			Controllers: []*quarrypb.ControllerInfo{{Url: service(t, "v1", 200, 0)}},
			Table: &quarrypb.Table{
				Nodes: []*quarrypb.Node{
					{Id: 1, Name: "cut-off", State: quarrypb.NodeState_NODE_STATE_UP, AgentUrl: gone, CapacityBytes: 100, HostedBytes: 95, Persistence: &quarrypb.Persistence{Kind: "devdax", Flush: "clwb", Method: "appliance"}, MissingRegions: []uint32{4, 7}, Numa: &quarrypb.Numa{Memory: new(uint32), Adapter: &one}, Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: "127.0.0.1:1"}}},
					{Id: 2, Name: "asleep", State: quarrypb.NodeState_NODE_STATE_SILENT},
					{Id: 3, Name: "gone", State: quarrypb.NodeState_NODE_STATE_DOWN}},
				Regions: []*quarrypb.Region{
					{Id: 1, State: quarrypb.RegionState_REGION_STATE_LOST},
					{Id: 2, State: quarrypb.RegionState_REGION_STATE_RECOVERING},
					{Id: 3, State: quarrypb.RegionState_REGION_STATE_OPEN, WantReplicas: 2, Replicas: replica(quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC)},
					{Id: 4, State: quarrypb.RegionState_REGION_STATE_OPEN, Condition: quarrypb.RegionState_REGION_STATE_UNAVAILABLE, WantReplicas: 1, Replicas: []*quarrypb.Replica{{Node: 2, State: quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC}}}},
			}}}
	text := ""
	for _, f := range c.Check(t.Context()) {
		if f.Level != OK {
			require.NotEmpty(t, f.What)
			if f.Level != Info {
				require.NotEmpty(t, f.Remedy, "%+v", f)
			}
			text += string(f.Level) + " " + f.What + "\n"
		}
	}
	for _, want := range []string{
		"error http://127.0.0.1:1: ", "error " + c.Controllers[1] + ": answers 503", "warning the wall clock of " + c.Controllers[0], "error asleep", "is silent",
		"error agent of cut-off", "error tcp of cut-off", "warning cut-off hosts 95 B of 100 B", "warning cut-off has RDMA clients make changes durable by a READ", "warning cut-off started without the files of regions [4 7]", "warning cut-off: its regions lie on NUMA node 0, its adapter is on node 1", "error region 1 is lost", "error region 2 is recovering",
		"warning 1 regions are degraded", "error region 4 is unavailable: of its replicas in sync asleep is silent", "info gone () is removed", "warning 2 run side by side: v1", "info 4 controllers survive",
	} {
		require.Contains(t, text, want)
	}
}

func TestNobodyLeads(t *testing.T) {
	c := Cluster{Controllers: []string{"http://127.0.0.1:1"}, Err: errors.New("nobody")}
	list := c.Check(t.Context())
	require.Equal(t, Error, Worst(list))
	require.Contains(t, list[len(list)-1].What, "no controller leads: nobody")
}

func TestFreePorts(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	used := strings.TrimPrefix(s.URL, "http://")
	list := FreePorts(used, "127.0.0.1:0", "192.0.2.1:1", "nonsense")
	require.Equal(t, []Level{Info, OK, Error, Error}, []Level{list[0].Level, list[1].Level, list[2].Level, list[3].Level})
}
