package client

import (
	"bytes"
	"log"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestQuietByDefault: a program that gives no Logger gets warnings in its own log, and no news.
func TestQuietByDefault(t *testing.T) {
	var text bytes.Buffer
	was, output, flags := slog.Default(), log.Writer(), log.Flags()
	t.Cleanup(func() {
		slog.SetDefault(was)
		log.SetOutput(output) // slog.SetDefault sends package log to the handler, and does not take that back
		log.SetFlags(flags)
	})
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug})))
	l := Config{}.withDefaults().Logger
	for _, l := range []*slog.Logger{l, l.With("a", 1), l.WithGroup("g")} {
		l.Info("connected")
		l.Debug("dialled")
		require.Empty(t, text.String())
		l.Warn("cut off")
		require.Contains(t, text.String(), "cut off")
		text.Reset()
	}
	mine := slog.New(slog.DiscardHandler)
	require.Same(t, mine, Config{Logger: mine}.withDefaults().Logger)
}
