package metrics

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/verify/certs"

	"github.com/quarrystore/quarry/internal/latency"
)

type collector struct {
	g *Group
	m []prometheus.Metric
}

func (c collector) Describe(ch chan<- *prometheus.Desc) { c.g.Describe(ch) }
func (c collector) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c.m {
		ch <- m
	}
}

func TestHistogramsInBothForms(t *testing.T) {
	var h latency.Histogram
	for _, d := range []time.Duration{time.Microsecond, time.Microsecond, 3 * time.Microsecond, time.Millisecond, time.Hour} {
		h.Observe(d)
	}
	g := NewGroup("", "")
	d := g.Histogram("quarry_test_duration_seconds", "A test.", "kind")
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(collector{g, []prometheus.Metric{d.Latency(h.Snapshot(), "a"), d.Latency(latency.Snapshot{}, "b")}})
	families, err := r.Gather()
	require.NoError(t, err)
	require.Len(t, families, 1)
	p := families[0].Metric[0].GetHistogram()
	require.EqualValues(t, 5, p.GetSampleCount())
	require.InDelta(t, 3600.001005, p.GetSampleSum(), 1e-6)

	// Classic: cumulative, rising, each a power of two.
	below := func(s float64) (n uint64) {
		for _, b := range p.Bucket {
			if b.GetUpperBound() <= s*1.0000001 {
				n = b.GetCumulativeCount()
			}
		}
		return n
	}
	require.EqualValues(t, 2, below(1.0/(1<<19)), "1.9 us")
	require.EqualValues(t, 3, below(1.0/(1<<18)))
	require.EqualValues(t, 4, below(1))
	require.EqualValues(t, 5, below(32), "what lies above is in the last")

	// Native: the counts come out again.
	var total, count int64
	for _, delta := range p.PositiveDelta {
		count += delta
		total += count
	}
	require.EqualValues(t, 5, total)
	require.EqualValues(t, latency.Schema, p.GetSchema())
	buckets := 0
	for _, s := range p.PositiveSpan {
		buckets += int(s.GetLength())
	}
	require.Equal(t, len(p.PositiveDelta), buckets)
	empty := families[0].Metric[1].GetHistogram()
	require.Zero(t, empty.GetSampleCount())
	require.Len(t, empty.PositiveSpan, 1)
}

func TestWrongLabelsAreAnError(t *testing.T) {
	g := NewGroup("", "")
	d := g.Histogram("quarry_test_duration_seconds", "A test.", "kind")
	c := g.Counter("quarry_test_things_total", "A test.", "kind")
	for _, m := range []prometheus.Metric{d.Latency(latency.Snapshot{}), c.Value(1)} {
		require.Error(t, m.Write(&dto.Metric{}))
	}
}

func TestComplaints(t *testing.T) {
	g := NewGroup("", "")
	g.Counter("quarry_test_things", "Counts things.")
	g.Gauge("quarry_test_things_total", "Counts things.")
	g.Gauge("test_x", "no")
	g.Histogram("quarry_test_duration_ms", "How long things took.", "job")
	require.Len(t, Complaints([]*Group{g}), 6)
}

func TestServe(t *testing.T) {
	s, err := Serve(t.Context(), "127.0.0.1:0", NewRegistry("v1", "test"), false, nil)
	require.NoError(t, err)
	for path, want := range map[string]string{"/metrics": `quarry_build_info{go_version="go`, "/healthz": "ok", "/": "/metrics"} {
		res, err := http.Get(s.URL() + path)
		require.NoError(t, err)
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		res.Body.Close()
		require.Contains(t, string(b), want)
	}
	for _, path := range []string{"/etc", "/debug/pprof/", "/debug/pprof/profile"} {
		res, err := http.Get(s.URL() + path)
		require.NoError(t, err)
		res.Body.Close()
		require.Equal(t, http.StatusNotFound, res.StatusCode, path)
	}
	_, err = Serve(t.Context(), strings.TrimPrefix(s.URL(), "http://"), NewRegistry("v1", "test"), false, nil)
	require.ErrorContains(t, err, "--metrics-listen")
	require.NoError(t, s.Close())
	_, err = http.Get(s.URL() + "/metrics")
	require.Error(t, err)
}

// TestProfiles: profiles are served where they are asked for.
func TestProfiles(t *testing.T) {
	s, err := Serve(t.Context(), "127.0.0.1:0", NewRegistry("v1", "test"), true, nil)
	require.NoError(t, err)
	defer s.Close()
	res, err := http.Get(s.URL() + "/debug/pprof/goroutine?debug=1")
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(b), "goroutine profile: total")
}

// The port serves TLS with the certificate of the process, also one that is replaced, and with required only clients of the
// cluster.
func TestServeOverTLS(t *testing.T) {
	ours, foreign := certs.New(t, "prod"), certs.New(t, "other")
	files := ours.Files(identity.Node, "n1", "127.0.0.1")
	src, err := identity.Open(files, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	pem, err := os.ReadFile(ours.CA)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(pem))
	get := func(url string, show *identity.Files) (serial string, err error) {
		c := &tls.Config{RootCAs: pool}
		if show != nil {
			pair, err := tls.LoadX509KeyPair(show.Cert, show.Key)
			require.NoError(t, err)
			c.Certificates = []tls.Certificate{pair}
		}
		tr := &http.Transport{TLSClientConfig: c}
		defer tr.CloseIdleConnections()
		res, err := (&http.Client{Transport: tr}).Get(url + "/metrics")
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Contains(t, string(b), "quarry_build_info")
		return res.TLS.PeerCertificates[0].SerialNumber.String(), nil
	}
	serve := func(mode string) string {
		secured, err := TLS(mode, src)
		require.NoError(t, err)
		s, err := Serve(t.Context(), "127.0.0.1:0", NewRegistry("v1", "test"), false, secured)
		require.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		require.True(t, strings.HasPrefix(s.URL(), "https://"))
		return s.URL()
	}
	on, required := serve(TLSOn), serve(TLSRequired)
	was, err := get(on, nil)
	require.NoError(t, err)
	viewer, stranger := ours.Files(identity.Viewer, "prometheus"), foreign.Files(identity.Viewer, "prometheus")
	_, err = get(required, &viewer)
	require.NoError(t, err)
	for name, show := range map[string]*identity.Files{"no certificate": nil, "one of another authority": &stranger} {
		_, err = get(required, show)
		require.ErrorContains(t, err, "tls", name)
	}
	plain, err := http.Get(strings.Replace(required, "https", "http", 1) + "/metrics")
	require.NoError(t, err)
	require.NoError(t, plain.Body.Close())
	require.Equal(t, http.StatusBadRequest, plain.StatusCode)

	require.Equal(t, files, ours.Files(identity.Node, "n1", "127.0.0.1"), "in the place of the former ones")
	now, err := get(required, &viewer)
	require.NoError(t, err)
	require.NotEqual(t, was, now, "the certificate has been replaced")

	for mode, says := range map[string]string{"maybe": "want off, on or required", TLSOn: "no certificate", TLSRequired: "no certificate"} {
		_, err := TLS(mode, nil)
		require.ErrorContains(t, err, says)
	}
}
