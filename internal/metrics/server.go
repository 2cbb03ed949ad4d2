package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/identity"
)

// Process is what every process tells of itself.
var Process = NewGroup("Every process", "Beside these, the usual `go_*` and `process_*` metrics of a Go program.")

var (
	buildInfo   = Process.Gauge("quarry_build_info", "Always 1; the labels tell what runs.", "version", "go_version", "role")
	httpConns   = Process.Gauge("quarry_http_connections", "Connections to the HTTP ports of this process.", "port")
	httpRefused = Process.Counter("quarry_http_refused_total", "Requests and connections that a port refused: calls without a token, compressed ones, bodies over the procedure's limit; a Host or Origin that a browser was led to; connections that authenticated nothing and were closed for newer ones or after 32 KiB (preauth), or were too many (full).", "port", "reason")
)

var certEnds = Process.Gauge("quarry_certificate_end_seconds", "When the certificate of this process that is in use ends, in seconds since 1970. Absent without a certificate.").Rarely()

// Certificate is the collector of a process's certificate.
type Certificate struct{ Trust *identity.Source }

// Describe implements prometheus.Collector; Process describes the metric.
func (Certificate) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c Certificate) Collect(ch chan<- prometheus.Metric) {
	if end := c.Trust.Expires(); !end.IsZero() {
		ch <- certEnds.Value(float64(end.Unix()))
	}
}

type process struct{ version, role string }

func (process) Describe(ch chan<- *prometheus.Desc) { Process.Describe(ch) }
func (p process) Collect(ch chan<- prometheus.Metric) {
	ch <- buildInfo.Value(1, p.version, runtime.Version(), p.role)
	for _, port := range httpserver.Ports() {
		ch <- httpConns.Value(float64(port.Open()), port.Name)
		port.Refused(func(why httpserver.Reason, n uint64) { ch <- httpRefused.Value(float64(n), port.Name, why.String()) })
	}
}

// NewRegistry is a registry for one process in a role such as "storage".
func NewRegistry(version, role string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(process{version, role}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Limits of the port: a scrape costs a look at every region.
const (
	maxScrapes    = 4
	scrapeTimeout = 10 * time.Second
)

// Modes of TLS of the port.
const (
	TLSOff      = "off"      // plain
	TLSOn       = "on"       // with the certificate of the process; any client is served
	TLSRequired = "required" // only clients with a certificate of the cluster, of any role, too
)

// TLS is the configuration for a mode, "" for TLSOff, with the certificate of a process; trust is nil if it has
// none.
func TLS(mode string, trust *identity.Source) (*tls.Config, error) {
	switch {
	case mode == "" || mode == TLSOff:
		return nil, nil
	case mode != TLSOn && mode != TLSRequired:
		return nil, fmt.Errorf("%q: want off, on or required", mode)
	case trust == nil || !trust.Serves():
		return nil, fmt.Errorf("%s: no certificate: give --tls-cert and --tls-key", mode)
	case mode == TLSOn:
		return trust.Server(), nil
	case !trust.Mutual():
		return nil, fmt.Errorf("%s: no authority, or a certificate that names no role: give --tls-ca, and a certificate of quarry cert", mode)
	}
	return trust.ServerFor(identity.Roles...), nil
}

// Server serves a registry.
type Server struct {
	url    string
	http   *httpserver.Server
	failed chan error
	done   chan struct{}
}

// Serve opens the port. Port 0 takes a free one. With profiles it serves the profiles of
// net/http/pprof too, below /debug/pprof: a caller that reaches the port can then slow the process.
// secured is the configuration of TLS; nil: the port is plain.
func Serve(ctx context.Context, listen string, r *prometheus.Registry, profiles bool, secured *tls.Config) (*Server, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("metrics: %w: another program has this port; choose another with --metrics-listen", err)
	}
	if err != nil {
		return nil, fmt.Errorf("metrics: %w; want HOST:PORT of this host in --metrics-listen", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{
		Registry: r, MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout, ErrorHandling: promhttp.ContinueOnError, EnableOpenMetrics: true,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	index := "/metrics for Prometheus, /healthz"
	if profiles {
		index += ", /debug/pprof"
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, index) })
	scheme := "http://"
	if secured != nil {
		scheme = "https://"
	}
	s := &Server{url: scheme + l.Addr().String(), failed: make(chan error, 1), done: make(chan struct{}),
		http: httpserver.New("metrics", known(mux))}
	s.http.TLS = secured
	go func() {
		defer close(s.done)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.failed <- fmt.Errorf("metrics on %s: %w", s.url, err)
		}
	}()
	return s, nil
}

// known keeps the connection of a client with a certificate of the cluster open when others, without, are closed.
func known(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
			httpserver.Known(r.Context())
		}
		h.ServeHTTP(w, r)
	})
}

// URL is where the port is; /metrics is below it.
func (s *Server) URL() string { return s.url }

// Err yields what has stopped the port from serving.
func (s *Server) Err() <-chan error { return s.failed }

// Close stops serving. Scrapes under way are waited for, for a second.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		_ = s.http.Close()
	}
	<-s.done
	return nil
}
