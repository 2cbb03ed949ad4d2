package controller_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
)

// listener passes on the first line of a log that has a word in it.
type listener struct {
	slog.Handler
	word string
	line chan string // has room for one
}

func (l *listener) Enabled(context.Context, slog.Level) bool { return true }

func (l *listener) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.word) {
		select {
		case l.line <- r.Message:
		default:
		}
	}
	return nil
}

// The host of a node whose process has ended refuses connections. The controller sees that, and says so.
func TestEndedNodeRefusesConnections(t *testing.T) {
	_, etcd := store(t)
	log := &listener{Handler: slog.DiscardHandler, word: "is lost", line: make(chan string, 1)}
	c, rpc := start(t, controller.Config{Etcd: etcd, Logger: slog.New(log)})
	lead(t, c)
	a := newAgent(t, "a", "/dc/r1/a", 1)
	a.register(rpc)
	a.srv.Close()
	select {
	case line := <-log.line:
		require.Contains(t, line, "refused 3 connections in a row to "+a.srv.URL)
	case <-time.After(patience):
		t.Fatal("the node is not lost")
	}
}
