package collect

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/quarrystore/quarry/gateway/flight"
	"github.com/quarrystore/quarry/internal/metrics"
)

// FlightGroup lists the metrics of a Flight server.
var FlightGroup = metrics.NewGroup("Flight servers", "Served by `quarry gateway flight`.")

var (
	flightCalls       = FlightGroup.Counter("quarry_flight_calls_total", "Calls that have ended.")
	flightFailed      = FlightGroup.Counter("quarry_flight_failed_calls_total", "Calls that have ended with an error.")
	flightRefused     = FlightGroup.Counter("quarry_flight_refused_total", "Connections, streams and calls that were refused because there were too many, or because they showed no token.")
	flightStreams     = FlightGroup.Gauge("quarry_flight_streams", "Streams that are open, by direction: read or put.", "direction")
	flightRows        = FlightGroup.Counter("quarry_flight_rows_total", "Entries read or put.", "direction")
	flightBytes       = FlightGroup.Counter("quarry_flight_bytes_total", "Bytes of keys and values read or put.", "direction")
	flightCallers     = FlightGroup.Gauge("quarry_flight_callers", "Sessions that are open for callers.")
	flightMemory      = FlightGroup.Gauge("quarry_flight_memory_bytes", "Memory taken for batches that readers wait for; --memory bounds it.")
	flightMemoryLimit = FlightGroup.Gauge("quarry_flight_memory_limit_bytes", "What --memory is.")
)

// Flight collects from a Flight server.
type Flight struct {
	server *flight.Server
	memory int64
}

// NewFlight makes a collector of a server with an amount of memory for batches.
func NewFlight(s *flight.Server, memory int64) *Flight { return &Flight{s, memory} }

// Describe implements prometheus.Collector.
func (*Flight) Describe(ch chan<- *prometheus.Desc) { FlightGroup.Describe(ch) }

// Collect implements prometheus.Collector.
func (f *Flight) Collect(ch chan<- prometheus.Metric) {
	s := f.server.Stats()
	for _, v := range []struct {
		def    *metrics.Def
		n      float64
		labels []string
	}{
		{flightCalls, float64(s.Calls), nil}, {flightFailed, float64(s.Failed), nil}, {flightRefused, float64(s.Refused), nil},
		{flightStreams, float64(s.Reading), []string{"read"}}, {flightStreams, float64(s.Putting), []string{"put"}},
		{flightRows, float64(s.RowsRead), []string{"read"}}, {flightRows, float64(s.RowsPut), []string{"put"}},
		{flightBytes, float64(s.BytesRead), []string{"read"}}, {flightBytes, float64(s.BytesPut), []string{"put"}},
		{flightCallers, float64(s.Callers), nil}, {flightMemory, float64(s.MemoryBytes), nil}, {flightMemoryLimit, float64(f.memory), nil},
	} {
		ch <- v.def.Value(v.n, v.labels...)
	}
}
