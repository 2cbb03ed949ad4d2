package controller_test

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// fullPipe is a log that takes no more lines once it has been given a word, until it is drained.
type fullPipe struct {
	slog.Handler
	word  string
	drain chan struct{}
}

func (p *fullPipe) Enabled(context.Context, slog.Level) bool { return true }

func (p *fullPipe) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, p.word) {
		<-p.drain
	}
	return nil
}

// A leader whose machine stands still, while its process answers and its lease could be
// renewed, makes room for another.
func TestALeaderWhoseMachineHangsMakesRoom(t *testing.T) {
	_, etcd := store(t)
	pipe := &fullPipe{Handler: slog.DiscardHandler, word: "node a (1) joined", drain: make(chan struct{})}
	a, askA := start(t, controller.Config{Etcd: etcd, Name: "a", Logger: slog.New(pipe)})
	drain := sync.OnceFunc(func() { close(pipe.drain) })
	t.Cleanup(drain)
	lead(t, a)
	b, askB := start(t, controller.Config{Etcd: etcd, Name: "b"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n := newAgent(t, "a", "/dc/r1/a", 1)
	go func() { // it is answered, but the answer comes behind the line in the log
		_, _ = askA.RegisterNode(ctx, connect.NewRequest(&quarrypb.RegisterNodeRequest{Node: n.rec, Secret: secret[:]}))
	}()
	lead(t, b)
	require.False(t, a.Leads())
	require.Error(t, <-a.Err())
	healthy := func() int {
		res, err := http.Get(a.URL() + "/healthz")
		require.NoError(t, err)
		res.Body.Close()
		return res.StatusCode
	}
	require.Equal(t, http.StatusServiceUnavailable, healthy())
	require.Len(t, do(t, askB.ReadTable, &quarrypb.ReadTableRequest{}).Nodes, 1)

	// It goes on, decides nothing in its old term, and stands by.
	drain()
	require.Eventually(t, func() bool { return healthy() == http.StatusOK }, patience, time.Millisecond)
	require.True(t, b.Leads())
	require.Zero(t, b.Stats(t.Context()).Deposed)
}
