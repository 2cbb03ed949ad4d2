package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/quarrystore/quarry/internal/local"
)

const (
	stopRows  = 500
	stopValue = 8 << 10 // so that the tree is much larger than what sockets and windows hold
)

// stoppable starts a server with --stop-timeout over a tree of stopRows entries, and begins to read it and to put into another tree: both streams
// are open and have moved a batch.
func stoppable(t *testing.T, trees, timeout string) (p *local.Process, r *flight.Reader, put *stream) {
	on(t, "kv", "create", "-t", trees+"-read").ok(t)
	on(t, "kv", "create", "-t", trees+"-put").ok(t)
	rows := filepath.Join(t.TempDir(), "rows.csv")
	var lines strings.Builder
	lines.WriteString("key,value\n")
	for i := range stopRows {
		fmt.Fprintf(&lines, "k%06d,%s\n", i, strings.Repeat("v", stopValue))
	}
	require.NoError(t, os.WriteFile(rows, []byte(lines.String()), 0o600))
	on(t, "kv", "load", "-t", trees+"-read", rows).ok(t)
	p, err := local.Spawn(t.Context(), executable(t), "gateway", "flight", "-C", cluster(t).URL, "--listen", "127.0.0.1:0", "--batch-bytes", "64KiB",
		"--stop-timeout", timeout)
	require.NoError(t, err)
	t.Cleanup(func() { p.Stop() })
	c, err := flight.NewClientWithMiddleware(p.Ready["address"], nil, nil, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(128<<10)) // they stay as small, and what is not read stays at the server
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	info, err := c.GetFlightInfo(t.Context(), &flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: fmt.Appendf(nil, `{"tree": "%s-read", "parts": 1}`, trees)})
	require.NoError(t, err)
	require.Len(t, info.Endpoint, 1)
	get, err := c.DoGet(t.Context(), info.Endpoint[0].Ticket)
	require.NoError(t, err)
	r, err = flight.NewRecordReader(get)
	require.NoError(t, err)
	t.Cleanup(r.Release)
	require.True(t, r.Next(), r.Err())
	put = newStream(t, c, trees+"-put")
	require.NoError(t, put.put("before"))
	return p, r, put
}

// stream is a DoPut that is open.
type stream struct {
	t    *testing.T
	grpc flight.FlightService_DoPutClient
	w    *flight.Writer
}

func newStream(t *testing.T, c flight.Client, tree string) *stream {
	s, err := c.DoPut(t.Context())
	require.NoError(t, err)
	w := flight.NewRecordWriter(s, ipc.WithSchema(arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary}}, nil)))
	w.SetFlightDescriptor(&flight.FlightDescriptor{Type: flight.DescriptorPATH, Path: []string{tree}})
	return &stream{t, s, w}
}

// put puts an entry and waits for its acknowledgement.
func (s *stream) put(key string) error {
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "key", Type: arrow.BinaryTypes.Binary}, {Name: "value", Type: arrow.BinaryTypes.Binary}}, nil))
	defer b.Release()
	b.Field(0).(*array.BinaryBuilder).AppendString(key)
	b.Field(1).(*array.BinaryBuilder).AppendString("value")
	rec := b.NewRecordBatch()
	defer rec.Release()
	if err := s.w.Write(rec); err != nil {
		return err
	}
	_, err := s.grpc.Recv()
	return err
}

// refused waits until nothing listens at an address.
func refused(t *testing.T, address string) {
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err != nil
	}, patience, 10*time.Millisecond)
}

// On SIGTERM a server accepts nothing more, and streams that run go on to their ends.
func TestFlightGatewayLetsStreamsEnd(t *testing.T) {
	p, r, put := stoppable(t, "stopped", "1h")
	require.NoError(t, p.Signal(syscall.SIGTERM))
	refused(t, p.Ready["address"])
	rows := int(r.RecordBatch().NumRows())
	for r.Next() {
		rows += int(r.RecordBatch().NumRows())
	}
	require.NoError(t, r.Err())
	require.Equal(t, stopRows, rows)
	require.NoError(t, put.put("after"))
	require.NoError(t, put.grpc.CloseSend())
	require.Zero(t, p.Wait().ExitCode(), p.Log())
	require.Empty(t, p.Log())
	require.Equal(t, "value", on(t, "kv", "get", "-t", "stopped-put", "after").ok(t))
}

// Streams that do not end by themselves are ended after --stop-timeout, and what was acknowledged is done.
func TestFlightGatewayEndsStreams(t *testing.T) {
	p, r, put := stoppable(t, "cut", "100ms")
	require.NoError(t, p.Signal(syscall.SIGTERM))
	ended, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	done := make(chan int, 1)
	go func() { done <- p.Wait().ExitCode() }()
	select {
	case code := <-done:
		require.Zero(t, code, p.Log())
	case <-ended.Done():
		t.Fatal("the server does not end")
	}
	require.Contains(t, p.Log(), `"reading":1,"putting":1`)
	for r.Next() { //nolint:revive // to its end
	}
	require.Error(t, r.Err(), "a stream that is not whole ends with an error")
	require.Error(t, put.put("late"))
	require.Equal(t, "value", on(t, "kv", "get", "-t", "cut-put", "before").ok(t))
}
