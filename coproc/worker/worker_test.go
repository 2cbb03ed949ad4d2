package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/internal/metrics"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

type lengths struct{}

func (lengths) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	return emit(key, []byte{byte(len(value))})
}

func init() {
	coproc.Register("lengths", "tells how long values are", func() coproc.Plugin { return lengths{} })
}

func none(string) string { return "" }

func scrape(t *testing.T, url string) map[string]*dto.MetricFamily {
	res, err := http.Get(url)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(res.Body)
	require.NoError(t, err)
	return families
}

// A program of one's own works and can be watched: everything in the reference is
// served, and nothing else.
func TestWorkerOfOnesOwn(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{})
	in, err := kv.Create(t.Context(), c, "in", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, in.Put(t.Context(), []byte("greeting"), []byte("hello")))

	// As a storage node starts it.
	ctx, stop := context.WithCancel(t.Context())
	out, said := io.Pipe()
	code := make(chan int, 1)
	var log bytes.Buffer
	go func() {
		code <- run(ctx, []string{"worker", "--controller", cluster.Controller.URL(), "--node", cluster.NodeConfig(0).Name, "--name", "mine",
			"--fabric", "auto", "--replicas", "1", "--metrics-listen", "127.0.0.1:0"}, none, said, &log)
		said.Close()
	}()
	var ready struct{ Ready, Metrics string }
	require.NoError(t, json.NewDecoder(out).Decode(&ready), "%s", &log)
	require.Equal(t, "worker", ready.Ready)

	store, err := job.Open(t.Context(), c)
	require.NoError(t, err)
	var j *job.Job
	require.Eventually(t, func() bool {
		j, err = store.Submit(t.Context(), job.Spec{Plugin: "lengths", Input: job.Source{Tree: "in"}, Output: "out"})
		return err == nil
	}, patience, 5*time.Millisecond)
	j, err = store.Wait(t.Context(), j.ID)
	require.NoError(t, err)
	require.Equal(t, job.Done, j.State, j.Error)
	result, err := kv.Open(t.Context(), c, "out", btree.Config{})
	require.NoError(t, err)
	n, err := result.Get(t.Context(), []byte("greeting"), nil)
	require.NoError(t, err)
	require.Equal(t, []byte{5}, n)

	var families map[string]*dto.MetricFamily
	counted := func(name string, labels ...string) float64 {
		for _, m := range families[name].GetMetric() {
			have := map[string]bool{}
			for _, l := range m.Label {
				have[l.GetName()+"="+l.GetValue()] = true
			}
			all := true
			for _, l := range labels {
				all = all && have[l]
			}
			if all {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		t.Fatalf("%s%v is not there", name, labels)
		return 0
	}
	require.Eventually(t, func() bool {
		families = scrape(t, ready.Metrics)
		return counted("quarry_worker_ended_jobs_total", "state=done", "worker=mine") == 1
	}, patience, 20*time.Millisecond)
	require.EqualValues(t, 1, counted("quarry_worker_attempts_total", "phase=map", "outcome=done"))
	require.EqualValues(t, 1, counted("quarry_worker_attempt_duration_seconds", "phase=map"))
	require.EqualValues(t, 1, counted("quarry_worker_claimed_parts_total", "place=near"))
	require.EqualValues(t, 13, counted("quarry_worker_read_bytes_total", "from=tree"))
	require.EqualValues(t, 1, counted("quarry_jobs_workers"))
	require.Zero(t, counted("quarry_jobs_running"))
	require.Positive(t, counted("quarry_tree_cached_nodes", "tree=.jobs")+1)
	declared := map[string]bool{}
	for _, d := range Group.Defs {
		declared[d.Name] = true
		require.NotNil(t, families[d.Name], d.Name)
		require.Equal(t, string(d.Kind), strings.ToLower(families[d.Name].GetType().String()), d.Name)
	}
	for name := range families {
		if strings.HasPrefix(name, "quarry_worker_") || strings.HasPrefix(name, "quarry_jobs_") {
			require.True(t, declared[name], name)
		}
	}
	require.Empty(t, metrics.Complaints([]*metrics.Group{Group}))

	stop()
	require.Zero(t, <-code, "%s", &log)
	workers, err := store.Workers(t.Context())
	require.NoError(t, err)
	require.Empty(t, workers, "it has signed off")
}

func TestWorkerIsToldWhatIsWrong(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--fly"}, exitUsage, "fly"},
		{[]string{"worker", "now"}, exitUsage, `"now": want flags alone`},
		{[]string{"--memory-mib", "0"}, exitUsage, "want 1 or more"},
		{[]string{"--replicas", "9"}, exitUsage, "--replicas 9"},
		{[]string{"--tls-ca", "/nowhere"}, exitUsage, "/nowhere"},
		{[]string{"--metrics-listen", taken.Addr().String()}, exitFailed, "--metrics-listen"},
		{[]string{"--help"}, 0, "-controller"},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, c.code, run(t.Context(), c.args, none, &out, &errs), "%v: %s", c.args, &errs)
		require.Contains(t, errs.String(), c.want)
		require.Empty(t, out.String())
	}
	// Variables stand in for flags.
	var errs bytes.Buffer
	o, err := parse(nil, func(name string) string {
		return map[string]string{"QUARRY_CONTROLLER": "http://a:1,http://b:2", "QUARRY_TOKEN": "secret"}[name]
	}, &errs)
	require.NoError(t, err)
	require.Equal(t, []string{"http://a:1", "http://b:2"}, o.client.Controllers)
	require.Equal(t, "secret", o.client.Token)
}
