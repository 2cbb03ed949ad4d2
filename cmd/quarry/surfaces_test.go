package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/cmd/quarry/doctor"
	"github.com/quarrystore/quarry/controller/console"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// surfaces are where users see the state of region 1, each by its own path: the command
// line, the doctor, the metrics, the console, and the table that clients work by.
type surfaces struct {
	t        *testing.T
	c        *testcluster.Cluster
	registry *prometheus.Registry
	page     *httptest.Server
}

func newSurfaces(t *testing.T, c *testcluster.Cluster) *surfaces {
	s := &surfaces{t: t, c: c, registry: prometheus.NewRegistry()}
	s.registry.MustRegister(collect.NewController(c.Controller))
	page := console.New(console.Config{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { page.Run(ctx, c.Controller.URL()); close(done) }()
	s.page = httptest.NewServer(page)
	t.Cleanup(func() { s.page.Close(); cancel(); <-done })
	return s
}

// command runs a command in this process.
func (s *surfaces) command(args ...string) (string, error) {
	var out, errOut bytes.Buffer
	code := run(append([]string{"-C", s.c.Controller.URL()}, args...), nil, &out, &errOut)
	if code != exitOK && code != exitDamaged {
		return out.String(), fmt.Errorf("exit code %d: %s", code, errOut.String())
	}
	return out.String(), nil
}

func (s *surfaces) json(v any, args ...string) {
	s.t.Helper()
	out, err := s.command(append([]string{"--json"}, args...)...)
	require.NoError(s.t, err)
	require.NoError(s.t, json.Unmarshal([]byte(out), v), out)
}

// status is what quarry status --json calls the region; "" when there is none.
func (s *surfaces) status() string {
	var v statusView
	s.json(&v, "status")
	for _, r := range v.Regions {
		return r.State
	}
	return ""
}

// text is the state column of the region in quarry region list.
func (s *surfaces) text() string {
	out, err := s.command("region", "list")
	require.NoError(s.t, err)
	for _, line := range strings.Split(out, "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "1" {
			return f[1]
		}
	}
	return ""
}

// doctor is the state that the findings about regions name, and their level.
func (s *surfaces) doctor() (state string, level doctor.Level) {
	var list []doctor.Finding
	s.json(&list, "doctor")
	level = doctor.OK
	for _, f := range list {
		if f.Check != "regions" || strings.HasPrefix(f.What, "0 ") {
			continue
		}
		for _, c := range quarrypb.RegionConditions {
			if slices.Contains(strings.FieldsFunc(f.What, func(r rune) bool { return r == ' ' || r == ':' }), quarrypb.Word(c)) {
				state, level = quarrypb.Word(c), f.Level
			}
		}
	}
	return state, level
}

// metrics is the state whose gauge is 1, and whether the region counts as open.
func (s *surfaces) metrics() (states []string, open bool) {
	families, err := s.registry.Gather()
	require.NoError(s.t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			switch f.GetName() {
			case "quarry_cluster_regions":
				if m.Gauge.GetValue() == 1 {
					states = append(states, m.Label[0].GetValue())
				}
			case "quarry_region_open":
				open = m.Gauge.GetValue() == 1
			case "quarry_cluster_degraded_regions":
				if m.Gauge.GetValue() == 1 {
					states = append(states, "degraded by its own gauge")
				}
			}
		}
	}
	return states, open
}

// console is what the page is given.
func (s *surfaces) console() string {
	res, err := s.page.Client().Get(s.page.URL + "/console/state")
	require.NoError(s.t, err)
	defer res.Body.Close()
	var v console.Snapshot
	require.NoError(s.t, json.NewDecoder(res.Body).Decode(&v))
	for _, r := range v.Regions {
		return r.State
	}
	return ""
}

// table is what clients are given.
func (s *surfaces) table() string {
	res, err := s.c.Control().ReadTable(s.t.Context(), connect.NewRequest(&quarrypb.ReadTableRequest{}))
	require.NoError(s.t, err)
	for _, r := range res.Msg.Regions {
		return quarrypb.Word(r.Shown())
	}
	return ""
}

// TestSurfacesAgree: in every state of a region the command line, doctor, metrics,
// console and the clients' table call it the same, and an alert knows the bad ones.
func TestSurfacesAgree(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	s := newSurfaces(t, c)
	_, err := c.Control().CreateRegion(t.Context(), connect.NewRequest(&quarrypb.CreateRegionRequest{Replicas: 2, Durability: quarrypb.Durability_DURABILITY_MEM}))
	require.NoError(t, err)
	alerts, err := os.ReadFile("../../deploy/prometheus/rules/alerts.yml")
	require.NoError(t, err)
	seen := map[string]bool{}
	agree := func(state string, level doctor.Level, usable bool, alert string) {
		t.Helper()
		seen[state] = true
		require.Eventually(t, func() bool { return s.status() == state }, patience, 20*time.Millisecond, "quarry status: %s, want %s", s.status(), state)
		require.Equal(t, state, s.text(), "quarry region list")
		require.Equal(t, state, s.table(), "the table")
		shown, as := s.doctor()
		require.Equal(t, state, shown, "quarry doctor")
		require.Equal(t, level, as, "quarry doctor")
		want := []string{state}
		if state == "degraded" {
			want = []string{"degraded by its own gauge", state}
		}
		states, open := s.metrics()
		require.ElementsMatch(t, want, states, "metrics")
		require.Equal(t, usable, open, "quarry_region_open")
		require.Eventually(t, func() bool { return s.console() == state }, patience, 50*time.Millisecond, "console: %s, want %s", s.console(), state)
		if alert != "" {
			require.Contains(t, string(alerts), "expr: "+alert+" > 0\n")
		}
	}
	by := func(state string) string {
		return fmt.Sprintf(`max by (cluster) (quarry_cluster_regions{state="%s"})`, state)
	}

	agree("open", doctor.OK, true, "")
	require.NoError(t, c.Nodes[1].Close())
	agree("degraded", doctor.Warning, true, "max by (cluster) (quarry_cluster_degraded_regions)")

	// A session that renews its lease and does not acknowledge holds a new epoch up.
	key := rdma.NewCredentials()
	opened, err := c.Control().OpenSession(t.Context(), connect.NewRequest(&quarrypb.OpenSessionRequest{Name: "holds the table", Key: key.Holder[:]}))
	require.NoError(t, err)
	serial := opened.Msg.Ticket.Serial
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				_, _ = c.Control().Heartbeat(context.Background(), connect.NewRequest(&quarrypb.HeartbeatRequest{Serial: serial, Proof: opened.Msg.Proof}))
			}
		}
	}()
	c.RestartNode(1)
	agree("recovering", doctor.Error, false, by("recovering"))
	close(stop)
	<-done
	_, err = c.Control().CloseSession(t.Context(), connect.NewRequest(&quarrypb.CloseSessionRequest{Serial: serial, Proof: opened.Msg.Proof}))
	require.NoError(t, err)
	agree("open", doctor.OK, true, "")

	for _, n := range c.Nodes {
		require.NoError(t, n.Close())
	}
	agree("unavailable", doctor.Error, false, by("unavailable"))
	for i := range c.Nodes {
		c.RestartNode(i)
	}
	agree("lost", doctor.Error, false, by("lost"))
	for _, state := range quarrypb.RegionConditions {
		require.True(t, seen[quarrypb.Word(state)], "no surface was looked at while the region was %v", state)
	}
}
