package main

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/verify/certs"
)

// docs/METRICS.md is made from the code: quarry metrics list --markdown > docs/METRICS.md
func TestMetricsReferenceIsCurrent(t *testing.T) {
	page := filepath.Join("..", "..", "docs", "METRICS.md")
	got := quarry(t, nil, "", "metrics", "list", "--markdown").ok(t)
	want, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "make it anew: go run ./cmd/quarry metrics list --markdown > docs/METRICS.md")
	require.Empty(t, metrics.Complaints(collect.Groups()))
	var groups []metrics.Group
	quarry(t, nil, "", "metrics", "list", "--json").decode(t, &groups)
	require.Len(t, groups, len(collect.Groups()))
	require.Contains(t, quarry(t, nil, "", "metrics", "list").ok(t), "quarry_node_chains_total")
}

// scrape reads a page of metrics as Prometheus does.
func scrape(t testing.TB, url string) map[string]*dto.MetricFamily {
	t.Helper()
	res, err := http.Get(url)
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, res.StatusCode, string(b))
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(strings.NewReader(string(b)))
	require.NoError(t, err)
	return families
}

// use does a little of everything that clients do.
func use(t testing.TB, c *client.Client) {
	t.Helper()
	ctx := t.Context()
	for i := range 256 {
		ref, err := c.Alloc(ctx, []byte("watched"), client.AllocOptions{})
		require.NoError(t, err)
		_, err = c.Read(ctx, ref, nil)
		require.NoError(t, err)
		require.NoError(t, c.Write(ctx, ref, []byte("again")))
		if i%2 == 0 {
			require.NoError(t, c.Free(ctx, ref))
			_, err = c.Read(ctx, ref, nil)
			require.True(t, errors.Is(err, client.ErrFreed))
		}
	}
}

// Everything that a running cluster serves is in the reference, and everything in
// the reference is served.
func TestClusterServesItsMetrics(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "2", "--replicas", "2", "--region-bytes", "32MiB", "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	defer p.Stop()
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{p.Ready["url"]}, Replicas: 2})
	require.NoError(t, err)
	defer c.Close()
	use(t, c)
	families := scrape(t, p.Ready["metrics"])
	registry := prometheus.NewRegistry()
	registry.MustRegister(prom.NewCollector(c))
	own, err := registry.Gather()
	require.NoError(t, err)
	for _, f := range own {
		families[f.GetName()] = f
	}

	g, err := local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", p.Ready["url"], "--listen", "127.0.0.1:0", "--tree", "watched", "--create", "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	defer g.Stop()
	for name, f := range scrape(t, g.Ready["metrics"]) {
		if strings.HasPrefix(name, "quarry_tree_") || strings.HasPrefix(name, "quarry_gateway_") {
			families[name] = f
		}
	}
	fl, err := local.Spawn(t.Context(), executable(t), "gateway", "flight", "-C", p.Ready["url"], "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	defer fl.Stop()
	for name, f := range scrape(t, fl.Ready["metrics"]) {
		if strings.HasPrefix(name, "quarry_flight_") {
			families[name] = f
		}
	}

	pages, err := local.Spawn(t.Context(), executable(t), "pager", "-C", p.Ready["url"], "--socket", filepath.Join(t.TempDir(), "pager"), "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	defer pages.Stop()
	for name, f := range scrape(t, pages.Ready["metrics"]) {
		if strings.HasPrefix(name, "quarry_pager_") {
			families[name] = f
		}
	}

	w, err := local.Spawn(t.Context(), executable(t), "worker", "-C", p.Ready["url"], "--name", "watched", "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	defer w.Stop()
	require.Eventually(t, func() bool { // until it has begun
		for name, f := range scrape(t, w.Ready["metrics"]) {
			if strings.HasPrefix(name, "quarry_worker_") || strings.HasPrefix(name, "quarry_jobs_") {
				families[name] = f
			}
		}
		return families["quarry_jobs_running"] != nil
	}, patience, 50*time.Millisecond)

	declared := map[string]*metrics.Def{}
	for _, g := range collect.Groups() {
		for _, d := range g.Defs {
			declared[d.Name] = d
			if families[d.Name] == nil && !d.Seldom {
				t.Errorf("%s is in the reference and not served", d.Name)
			}
		}
	}
	for name, f := range families {
		d := declared[name]
		if d == nil {
			require.False(t, strings.HasPrefix(name, "quarry_"), "%s is served and not in the reference", name)
			continue
		}
		require.Equal(t, string(d.Kind), strings.ToLower(f.GetType().String()), name)
	}

	value := func(name string, labels ...string) float64 {
		for _, m := range families[name].GetMetric() {
			match := true
			for i := 0; i < len(labels); i += 2 {
				found := false
				for _, l := range m.Label {
					found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}
				match = match && found
			}
			if match {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		t.Fatalf("%s%v is not there", name, labels)
		return 0
	}
	require.EqualValues(t, 1, value("quarry_controller_leader"))
	require.EqualValues(t, 2, value("quarry_cluster_nodes", "state", "up"))
	require.EqualValues(t, 1, value("quarry_cluster_regions", "state", "open"))
	require.EqualValues(t, 2, value("quarry_region_in_sync_replicas", "region", "1"))
	require.EqualValues(t, 256, value("quarry_client_calls_total", "kind", "alloc", "outcome", "ok"))
	require.EqualValues(t, 128, value("quarry_client_calls_total", "kind", "read", "outcome", "error"))
	require.Positive(t, value("quarry_client_call_duration_seconds", "kind", "read"))
	require.EqualValues(t, 1, value("quarry_client_provider_info", "provider", "shm"))
	require.Positive(t, value("quarry_node_chains_total", "node", "n1")+value("quarry_node_chains_total", "node", "n2"))
	require.EqualValues(t, 1, value("quarry_node_controller_reachable", "node", "n1"))
	require.EqualValues(t, 1, value("quarry_node_class_blocks", "slab_bytes", "128", "kind", "PAIR"))
}

// The canary of the cluster's token is nowhere on the page.
func TestMetricsTellNoSecrets(t *testing.T) {
	const canary = "canary-bird-7f3a"
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "1", "--region-bytes", "16MiB", "--metrics-listen", "127.0.0.1:0", "--token", canary)
	require.NoError(t, err)
	defer p.Stop()
	res, err := http.Get(p.Ready["metrics"])
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(b), "quarry_build_info")
	require.NotContains(t, string(b), canary)
}

func TestMetricsPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	at := l.Addr().String()
	quarry(t, nil, "", "dev", "--listen", "127.0.0.1:0", "--metrics-listen", at).fails(t, exitFailed, at, "--metrics-listen")
	quarry(t, nil, "", "controller", "--listen", "127.0.0.1:0", "--metrics-listen", at).fails(t, exitFailed, at, "--metrics-listen")
	quarry(t, nil, "", "storage", "-C", cluster(t).URL, "--name", "m", "--listen", "127.0.0.1:0", "--agent", "127.0.0.1:0", "--metrics-listen", at).fails(t, exitFailed, at, "--metrics-listen")
	quarry(t, nil, "", "worker", "-C", cluster(t).URL, "--metrics-listen", at).fails(t, exitFailed, at, "--metrics-listen")
	quarry(t, nil, "", "gateway", "redis", "-C", cluster(t).URL, "--tree", "m", "--create", "--metrics-listen", at).fails(t, exitFailed, at, "--metrics-listen")
	quarry(t, nil, "", "dev", "--listen", "127.0.0.1:0", "--workers", "1", "--worker-metrics-listen", "127.0.0.1:0").fails(t, exitUsage, "--worker-metrics-listen")
	quarry(t, nil, "", "dev", "--listen", "127.0.0.1:0", "--workers", "2", "--worker-metrics-listen", "127.0.0.1:65535").fails(t, exitUsage, "--worker-metrics-listen")
	quarry(t, nil, "", "dev", "--listen", "127.0.0.1:0", "--metrics-listen", "nonsense").fails(t, exitFailed, "--metrics-listen")
}

// A controller passes on what its etcd measures, and a process with a certificate says when that ends.
func TestControllerServesEtcdAndItsCertificate(t *testing.T) {
	ca := certs.New(t, "prod")
	own := ca.Files(identity.Controller, "c1", "127.0.0.1")
	p, err := local.Spawn(t.Context(), executable(t), "controller", "--listen", "127.0.0.1:0", "--gossip-listen", "none", "--data", t.TempDir(),
		"--tls-cert", own.Cert, "--tls-key", own.Key, "--tls-ca", own.CA, "--metrics-listen", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop()) })
	families := scrape(t, p.Ready["metrics"])
	require.Positive(t, families["etcd_disk_wal_fsync_duration_seconds"].GetMetric()[0].GetHistogram().GetSampleCount())
	require.Equal(t, 1.0, families["etcd_server_has_leader"].GetMetric()[0].GetGauge().GetValue())
	require.Greater(t, families["quarry_certificate_end_seconds"].GetMetric()[0].GetGauge().GetValue(), float64(time.Now().Unix()))
}
