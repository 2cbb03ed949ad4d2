package flight

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

const (
	// largestEntry is what the largest entry of a tree takes in a batch.
	largestEntry = btree.MaxKeyBytes + btree.MaxValueBytes
	// MinMemory is the smallest Config.MemoryBytes: one batch with the largest entry.
	MinMemory = 2 * largestEntry
	// maxHeaderBytes bounds the headers of a call.
	maxHeaderBytes = 16 << 10
	// idleConnection is how long a connection without calls stays open.
	idleConnection = 10 * time.Minute
	// pingAfter is when a connection that is silent is asked whether its peer is there, pingTimeout how long the answer may take.
	pingAfter   = time.Minute
	pingTimeout = 20 * time.Second
	// windowBytes is what a peer may send of a stream before the server reads it.
	windowBytes = 1 << 20
	// writeOnce is how much of a connection's frames, of 16 KiB at most, goes to the network in one write.
	writeOnce = 128 << 10
)

// Config of a Server. Connect is required; the zero value of each other field is explained there.
type Config struct {
	// Connect opens a client of the cluster with the token of a caller, and no other credentials; "" is a caller without a token. It returns
	// an error of package connect where controllers refuse the token.
	Connect func(ctx context.Context, token, tenant string, readOnly bool) (*client.Client, error)
	// Open serves callers without a token, where the cluster asks nobody for one.
	Open bool
	// Locations are the URIs of the server beside a storage node, by its name and its host, which may be "". nil, or no URIs: the
	// client reads where it has asked.
	Locations func(node, host string) []string

	BatchBytes   int           // of keys and values in a batch, unless one entry has more; 0: 256 KiB, which stays in a processor's cache
	BatchRows    int           // in a batch; 0: 65536
	MemoryBytes  int64         // of batches that readers have not read, and of those being put; 0: 256 MiB, at least 130 MiB
	ReadStreams  int           // DoGet at a time; 0: 64
	PutStreams   int           // DoPut at a time; 0: 8
	MessageBytes int           // of a message that a caller sends; 0: 16 MiB
	Connections  int           // at a time; 0: 256
	Callers      int           // sessions for callers at a time; 0: 64
	SlowReader   time.Duration // for which a batch may be left unread before its connection is closed, and a DoPut may send none; 0: 5 minutes
	StopTimeout  time.Duration // for which running calls may go on when the server ends; 0: 20 s
	TicketTTL    time.Duration // for which a ticket is good; 0: 1 hour
	CacheBytes   int           // of inner nodes of each tree that is open; 0: btree's default
	Logger       *slog.Logger  // nil: slog.Default
}

// withDefaults replaces zero values by the defaults.
func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field   *int
		standby int
	}{
		{&c.BatchBytes, 256 << 10}, {&c.BatchRows, 64 << 10}, {&c.ReadStreams, 64}, {&c.PutStreams, 8},
		{&c.MessageBytes, 16 << 20}, {&c.Connections, 256}, {&c.Callers, 64},
	} {
		if *d.field == 0 {
			*d.field = d.standby
		}
	}
	if c.MemoryBytes == 0 {
		c.MemoryBytes = 256 << 20
	}
	if c.SlowReader == 0 {
		c.SlowReader = 5 * time.Minute
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = 20 * time.Second
	}
	if c.TicketTTL == 0 {
		c.TicketTTL = time.Hour
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// validate refuses limits with which nothing, or not every value, can be read.
func (c Config) validate() error {
	for _, l := range []struct {
		name  string
		value int
		most  int
	}{
		{"BatchBytes", c.BatchBytes, largestEntry}, {"BatchRows", c.BatchRows, 1 << 20}, {"ReadStreams", c.ReadStreams, 1 << 16}, {"PutStreams", c.PutStreams, 1 << 16},
		{"MessageBytes", c.MessageBytes, 1 << 30}, {"Connections", c.Connections, 1 << 16}, {"Callers", c.Callers, 1 << 16},
	} {
		if l.value < 1 || l.value > l.most {
			return fmt.Errorf("flight: %s %d: want 1 to %d", l.name, l.value, l.most)
		}
	}
	switch {
	case c.Connect == nil:
		return errors.New("flight: Config.Connect is missing")
	case c.MemoryBytes < MinMemory:
		return fmt.Errorf("flight: MemoryBytes %d: want at least %d, for the largest value", c.MemoryBytes, MinMemory)
	case c.TicketTTL < 0 || c.SlowReader < 0 || c.StopTimeout < 0:
		return fmt.Errorf("flight: TicketTTL %v, SlowReader %v, StopTimeout %v: want more than 0", c.TicketTTL, c.SlowReader, c.StopTimeout)
	}
	return nil
}

// Server serves trees. Safe for concurrent use.
type Server struct {
	arrowflight.BaseFlightServer
	cfg     Config
	callers callers
	memory  *budget
	reads   *budget // one for each DoGet
	puts    *budget // one for each DoPut
	calls   gate
	parcels parcels // of batches that were written
	now     func() time.Time
	stats   counters
}

// counters of Stats.
type counters struct {
	calls, failed, refused, rowsRead, bytesRead, rowsPut, bytesPut atomic.Uint64
	reading, putting                                               atomic.Int64
}

// Stats are the counters of a Server.
type Stats struct {
	Calls, Failed     uint64 // calls that have ended, and those of them that failed
	Refused           uint64 // connections, streams and calls over a limit
	RowsRead, RowsPut uint64
	BytesRead         uint64 // of keys and values
	BytesPut          uint64
	Reading, Putting  int64 // streams that are open
	Callers           int64 // sessions that are open for callers
	MemoryBytes       int64 // of batches that readers have not read, or that are being put
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	n := &s.stats
	return Stats{
		Calls: n.calls.Load(), Failed: n.failed.Load(), Refused: n.refused.Load(), RowsRead: n.rowsRead.Load(), RowsPut: n.rowsPut.Load(),
		BytesRead: n.bytesRead.Load(), BytesPut: n.bytesPut.Load(), Reading: n.reading.Load(), Putting: n.putting.Load(),
		Callers: int64(s.callers.count()), MemoryBytes: s.memory.used(),
	}
}

// New makes a server.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, memory: newBudget(cfg.MemoryBytes), reads: newBudget(int64(cfg.ReadStreams)), puts: newBudget(int64(cfg.PutStreams)), now: time.Now}
	s.callers.init(&s.cfg)
	return s, nil
}

// Serve serves Flight at the listeners, over TLS with a configuration, until ctx ends. Then it closes the listeners, refuses new
// calls, and lets running ones go on until they end, or for Config.StopTimeout. Call it once.
func (s *Server) Serve(ctx context.Context, secured *tls.Config, listeners ...net.Listener) error {
	g := grpc.NewServer(
		grpc.ForceServerCodecV2(newCodec()), grpc.Creds(&handshakes{config: secured}),
		grpc.MaxRecvMsgSize(s.cfg.MessageBytes), grpc.MaxHeaderListSize(maxHeaderBytes), grpc.MaxConcurrentStreams(uint32(s.cfg.ReadStreams+s.cfg.PutStreams)),
		grpc.ConnectionTimeout(handshakeTimeout), grpc.InitialWindowSize(windowBytes), grpc.InitialConnWindowSize(windowBytes),
		grpc.WriteBufferSize(writeOnce), grpc.SharedWriteBuffer(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idleConnection, Time: pingAfter, Timeout: pingTimeout}),
		grpc.StatsHandler(taken{}), grpc.InTapHandle(s.tap), grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream),
	)
	arrowflight.RegisterFlightServiceServer(g, s)
	alive := health.NewServer()
	healthpb.RegisterHealthServer(g, alive)
	conns := newConnections(s.cfg.Connections, &s.stats.refused)
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { failed <- g.Serve(conns.over(l)) }()
	}
	var errs []error
	left := len(listeners)
	select {
	case <-ctx.Done():
	case err := <-failed:
		errs = append(errs, err)
		left--
	}
	alive.Shutdown()
	slow := time.AfterFunc(s.cfg.StopTimeout, func() {
		s.cfg.Logger.Warn("flight: calls were ended, they have not ended by themselves", "after", s.cfg.StopTimeout, "reading", s.stats.reading.Load(), "putting", s.stats.putting.Load())
		g.Stop()
	})
	g.GracefulStop()
	slow.Stop()
	for range left {
		if err := <-failed; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			errs = append(errs, err)
		}
	}
	s.callers.close()
	return errors.Join(errs...)
}
