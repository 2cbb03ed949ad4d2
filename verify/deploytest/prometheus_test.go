package deploytest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/nearest"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/deploy/grafana"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/verify/certs"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func TestPromtool(t *testing.T) {
	promtool := tool(t, "promtool", "apt-get install prometheus")
	dir := filepath.Join(root, "deploy", "prometheus")
	run(t, dir, promtool, "check", "config", "prometheus.yml")
	run(t, dir, promtool, "check", "config", "--syntax-only", "prometheus-tls.yml")
	run(t, dir, promtool, "check", "rules", "rules/recording.yml", "rules/alerts.yml")
	run(t, dir, promtool, "test", "rules", "rules_test.yml")
}

// The tests of the rules have each alert fire once at least, and stay quiet once at least where its series are there.
func TestEachAlertIsTested(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "rules_test.yml"))
	require.NoError(t, err)
	var tests struct {
		Tests []struct {
			Alerts []struct {
				Name     string `yaml:"alertname"`
				Expected []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	require.NoError(t, yaml.Unmarshal(b, &tests))
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range tests.Tests {
		for _, a := range test.Alerts {
			if len(a.Expected) > 0 {
				fires[a.Name] = true
			} else {
				quiet[a.Name] = true
			}
		}
	}
	n := 0
	for _, r := range rules(t) {
		if r.Alert != "" {
			require.True(t, fires[r.Alert], "%s is never seen firing", r.Alert)
			require.True(t, quiet[r.Alert], "%s is never seen quiet", r.Alert)
			n++
		}
	}
	require.Greater(t, n, 30)
}

type rule struct {
	Record, Alert, Expr, For string
	Labels, Annotations      map[string]string
}

func rules(t *testing.T) (out []rule) {
	for _, file := range []string{"recording.yml", "alerts.yml"} {
		b, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "rules", file))
		require.NoError(t, err)
		var f struct{ Groups []struct{ Rules []rule } }
		require.NoError(t, yaml.Unmarshal(b, &f))
		for _, g := range f.Groups {
			out = append(out, g.Rules...)
		}
	}
	return out
}

func TestAlertsSayWhatToDo(t *testing.T) {
	for _, r := range rules(t) {
		if r.Alert == "" {
			continue
		}
		require.Contains(t, []string{"critical", "warning", "info"}, r.Labels["severity"], r.Alert)
		require.NotEmpty(t, r.Annotations["summary"], r.Alert)
		require.Greater(t, len(r.Annotations["remedy"]), 20, r.Alert)
		require.Equal(t, runbook+strings.ToLower(r.Alert), r.Annotations["runbook_url"], r.Alert)
	}
}

const runbook = "https://github.com/quarrystore/quarry/blob/main/docs/ALERTS.md#"

// docs/ALERTS.md, where the alerts' links lead, says of each what raises it and what to do.
func TestAlertsHaveARunbook(t *testing.T) {
	page := "# Alerts\n\n<!-- Made from deploy/prometheus/rules/alerts.yml: go test ./verify/deploytest -run TestAlertsHaveARunbook -args -update -->\n\n" +
		"Each alert of `deploy/prometheus/rules/alerts.yml` and of the chart links here. Alerts of one cluster have its label `cluster`, which the scrape\n" +
		"configuration gives. `quarry doctor` and `quarry status` show the same conditions without Prometheus; [OPERATIONS.md](OPERATIONS.md#when-things-fail) says what fails how.\n"
	for _, r := range rules(t) {
		if r.Alert != "" {
			page += fmt.Sprintf("\n## %s\n\n%s", r.Alert, r.Labels["severity"])
			if r.For != "" {
				page += ", after " + r.For
			}
			page += ". " + r.Annotations["remedy"] + "\n\n```text\n" + r.Expr + "\n```\n"
		}
	}
	if *update {
		require.NoError(t, os.WriteFile(filepath.Join(root, "docs", "ALERTS.md"), []byte(page), 0o644))
	}
	require.Equal(t, page, read(t, "docs", "ALERTS.md"))
}

// One cluster's trouble is not hidden by another one: what is summed or compared is so by cluster.
func TestRulesTellClustersApart(t *testing.T) {
	for _, r := range rules(t) {
		for _, m := range aggregation.FindAllStringSubmatch(r.Expr, -1) {
			require.True(t, strings.HasPrefix(m[1], "by (cluster"), "%s%s: %s", r.Alert, r.Record, m[0])
		}
	}
}

var aggregation = regexp.MustCompile(`\b(?:sum|max|min|count|avg)\b ?((?:by \([^)]*\))?)`)

// watched is a real Prometheus that scrapes a running cluster with a client at work.
type watched struct{ url string }

func watch(t *testing.T) *watched {
	bin := tool(t, "prometheus", "apt-get install prometheus")
	cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
	c := cluster.Connect(client.Config{Replicas: 2})
	serve := func(role string, cs ...prometheus.Collector) string {
		r := metrics.NewRegistry("test", role)
		r.MustRegister(cs...)
		s, err := metrics.Serve(t.Context(), "127.0.0.1:0", r, false, nil)
		require.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		return strings.TrimPrefix(s.URL(), "http://")
	}
	tree, err := kv.Create(t.Context(), c, "watched", btree.Config{})
	require.NoError(t, err)
	gateway := redis.New(redis.Config{Tree: tree, Logger: slog.New(slog.DiscardHandler)})
	redisTraffic(t, gateway)
	ports := map[string]string{
		"quarry-controller": serve("controller", collect.NewController(cluster.Controller)),
		"quarry-storage":    serve("storage", collect.NewNodes(cluster.Nodes...)),
		"quarry-client":     serve("client", prom.NewCollector(c), collect.NewGateway(gateway)),
	}
	work(t, cluster, c)
	tally := &job.Tally{}
	ports["quarry-worker"] = serve("worker", worker.NewCollector(tally))
	jobs(t, cluster, c, tally)

	conf := "scrape_configs:\n"
	for job, port := range ports {
		conf += fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: [%q]}]}\n", job, port)
	}
	abs, err := filepath.Abs(filepath.Join(root, "deploy", "prometheus", "rules"))
	require.NoError(t, err)
	return prometheusOf(t, bin, "rule_files: ["+strconv.Quote(abs+"/*.yml")+"]\n"+conf)
}

// prometheusOf runs a Prometheus until the test ends.
func prometheusOf(t *testing.T, bin, conf string) *watched {
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte("global: {scrape_interval: 1s, evaluation_interval: 1s}\n"+conf), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	listen := l.Addr().String()
	require.NoError(t, l.Close())
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, bin, "--config.file", file, "--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", listen, "--log.level=warn")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	return &watched{"http://" + listen}
}

// redisTraffic serves a gateway and keeps a client of it busy until the test ends.
func redisTraffic(t *testing.T, gateway *redis.Server) {
	ctx, cancel := context.WithCancel(context.Background())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = gateway.Serve(ctx, l) })
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	wg.Go(func() { _, _ = io.Copy(io.Discard, conn) })
	wg.Go(func() {
		defer conn.Close()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := fmt.Fprintf(conn, "SET k%d v\r\nGET k%d\r\nGET nobody\r\n", i%1000, i%1000); err != nil {
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
}

// work keeps a client busy until the test ends, and sessions coming and going.
func work(t *testing.T, cluster *testcluster.Cluster, c *client.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	step := func() error {
		ref, err := c.Alloc(ctx, []byte("watched"), client.AllocOptions{})
		for range 4 {
			if err == nil {
				_, err = c.Read(ctx, ref, nil)
			}
			if err == nil {
				err = c.Write(ctx, ref, []byte("again"))
			}
		}
		if err == nil {
			err = c.Free(ctx, ref)
		}
		_, _ = c.Read(ctx, ref, nil)
		return err
	}
	wg.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			if err := step(); err != nil && ctx.Err() == nil {
				t.Errorf("work: %v", err)
				return
			}
			if i%100 == 0 {
				o, err := client.Connect(ctx, client.Config{Controllers: []string{cluster.Controller.URL()}})
				if err == nil {
					_ = o.Close()
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
}

// jobs keeps a worker busy until the test ends: with a tree and with objects, and now
// and then with a job that fails.
func jobs(t *testing.T, cluster *testcluster.Cluster, c *client.Client, tally *job.Tally) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() {
		err := job.Work(ctx, job.Config{Client: cluster.Connect(client.Config{}), Name: "watched", Tally: tally, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Errorf("worker: %v", err)
		}
	})
	texts, err := kv.Create(ctx, c, "texts", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, texts.Put(ctx, []byte("a"), []byte("stone on stone")))
	ref, err := c.Alloc(ctx, []byte("one two three"), client.AllocOptions{})
	require.NoError(t, err)
	_, err = c.Names().Create(ctx, "texts/a", "object", ref)
	require.NoError(t, err)
	store, err := job.Open(ctx, c)
	require.NoError(t, err)
	specs := []job.Spec{
		{Plugin: words.Name, Input: job.Source{Tree: "texts"}, Output: "counts", MapParts: 2, ReduceParts: 1},
		{Plugin: words.Name, Input: job.Source{Objects: "texts/"}, Output: "counts", MapParts: 2, ReduceParts: 1},
		{Plugin: nearest.Name, Input: job.Source{Tree: "texts"}, Output: "counts", Args: map[string]string{"query": "nonsense"}},
	}
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			j, err := store.Submit(ctx, specs[i%len(specs)])
			if err == nil {
				_, err = store.Wait(ctx, j.ID)
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, job.ErrNoPlugin) { // the worker is not there yet
				t.Errorf("job: %v", err)
				return
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
}

type sample struct {
	Metric map[string]string
	Value  []any
}

// ask puts an instant query; an error of a Prometheus that is not up yet is no samples.
func (w *watched) ask(t *testing.T, query string) []sample {
	res, err := http.Get(w.url + "/api/v1/query?query=" + url.QueryEscape(query))
	if err != nil {
		return nil
	}
	defer res.Body.Close()
	var body struct {
		Status, Error string
		Data          struct{ Result []sample }
	}
	if err := json.NewDecoder(res.Body).Decode(&body); err != nil || res.StatusCode == http.StatusServiceUnavailable {
		return nil
	}
	require.Equal(t, "success", body.Status, "%s: %s", query, body.Error)
	return body.Data.Result
}

// numbers says whether a sample is a number at all: a quantile of nothing is none.
func numbers(list []sample) bool {
	for _, s := range list {
		if v, err := strconv.ParseFloat(fmt.Sprint(s.Value[1]), 64); err == nil && !math.IsNaN(v) {
			return true
		}
	}
	return false
}

var variable = regexp.MustCompile(`\$\{?[a-z_]+`)

// Every query of every panel returns numbers, every recording rule records, and a
// cluster that is well raises none of the alerts that say it is not.
func TestPanelsShowARunningCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("runs a Prometheus; not with -short")
	}
	w := watch(t)
	type want struct{ where, query string }
	var wants []want
	for _, d := range grafana.Dashboards {
		for _, r := range d.Rows {
			for _, p := range r.Panels {
				for _, q := range p.Parsed() {
					expr := strings.NewReplacer("$__rate_interval", "5s", "$node", ".*").Replace(q.Expr)
					require.Empty(t, variable.FindString(expr), "%s: a variable that the dashboards do not have", p.Title)
					if !p.Foreign {
						wants = append(wants, want{d.Title + ": " + p.Title, expr})
					}
				}
			}
		}
	}
	for _, r := range rules(t) {
		if r.Record != "" {
			wants = append(wants, want{"rule", r.Record})
		}
	}
	require.Greater(t, len(wants), 60)
	deadline := time.Now().Add(2 * time.Minute)
	poll := time.NewTicker(200 * time.Millisecond)
	defer poll.Stop()
	for len(wants) > 0 && time.Now().Before(deadline) {
		var left []want
		for _, x := range wants {
			if !numbers(w.ask(t, x.query)) {
				left = append(left, x)
			}
		}
		wants = left
		<-poll.C
	}
	for _, x := range wants {
		t.Errorf("%s shows nothing: %s", x.where, x.query)
	}
	legends(t, w)
	for _, a := range w.ask(t, `ALERTS{alertname=~"QuarryTargetDown|QuarryTargetsAbsent|QuarryNoLeader|QuarryEtcdNoLeader|QuarryRebuildStalls|QuarryUnknown.*|QuarryGatewayRefuses|QuarryNodeNotUp|QuarryRegion.*|QuarryClientsBreakRules|QuarryTicketsRefused|QuarryCommitsFail|QuarryJobStandsStill|QuarryWorkersDie"}`) {
		t.Errorf("a cluster that is well raises %v", a.Metric)
	}
}

var legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)

// legends name labels that the series have.
func legends(t *testing.T, w *watched) {
	for _, d := range grafana.Dashboards {
		for _, r := range d.Rows {
			for _, p := range r.Panels {
				for _, q := range p.Parsed() {
					if p.Foreign || p.Type == grafana.Table {
						continue
					}
					expr := strings.NewReplacer("$__rate_interval", "5s", "$node", ".*").Replace(q.Expr)
					for _, s := range w.ask(t, expr) {
						for _, l := range legendLabel.FindAllStringSubmatch(q.Legend, -1) {
							if _, ok := s.Metric[l[1]]; !ok {
								t.Errorf("%s: legend %q, but the series has %v", p.Title, q.Legend, s.Metric)
							}
						}
						break
					}
				}
			}
		}
	}
}

// A real Prometheus scrapes a process that serves metrics to clients of the cluster alone: with a viewer's certificate, and
// not without.
func TestPrometheusScrapesOverTLS(t *testing.T) {
	bin := tool(t, "prometheus", "apt-get install prometheus")
	ca := certs.New(t, "prod")
	own, viewer := ca.Files(identity.Controller, "c1", "127.0.0.1"), ca.Files(identity.Viewer, "prometheus")
	p, err := local.Spawn(t.Context(), binary(t), "controller", "--listen", "127.0.0.1:0", "--tls-cert", own.Cert, "--tls-key", own.Key, "--tls-ca", own.CA, "--metrics-listen", "127.0.0.1:0", "--metrics-tls", "required")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop()) })
	port, secured := strings.CutPrefix(strings.TrimSuffix(p.Ready["metrics"], "/metrics"), "https://")
	require.True(t, secured, p.Ready["metrics"])
	w := prometheusOf(t, bin, fmt.Sprintf(`scrape_configs:
  - {job_name: viewer, scheme: https, static_configs: [{targets: [%[1]q]}], tls_config: {ca_file: %[2]q, cert_file: %[3]q, key_file: %[4]q}}
  - {job_name: stranger, scheme: https, static_configs: [{targets: [%[1]q]}], tls_config: {ca_file: %[2]q}}
`, port, ca.CA, viewer.Cert, viewer.Key))
	up := func(job string) string {
		res, err := http.Get(w.url + "/api/v1/query?query=" + url.QueryEscape(`up{job="`+job+`"}`))
		if err != nil {
			return ""
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		switch {
		case strings.Contains(string(b), `,"1"]`):
			return "up"
		case strings.Contains(string(b), `,"0"]`):
			return "down"
		}
		return ""
	}
	require.Eventually(t, func() bool { return up("viewer") == "up" && up("stranger") == "down" }, 3*time.Minute, 100*time.Millisecond)
}
