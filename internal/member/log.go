package member

import (
	"context"
	"log"
	"log/slog"
	"strings"
)

// lines hands memberlist's lines to slog. What it warns of is what gossip is there
// to find, and what it calls an error is a stranger's packet: neither is one of ours.
type lines struct{ log *slog.Logger }

func quiet(l *slog.Logger) *log.Logger { return log.New(lines{l}, "", 0) }

func (w lines) Write(b []byte) (int, error) {
	if w.log == nil {
		return len(b), nil
	}
	level, text := slog.LevelDebug, strings.TrimSpace(string(b))
	if rest, is := strings.CutPrefix(text, "[ERR] "); is {
		level, text = slog.LevelInfo, rest
	}
	w.log.Log(context.Background(), level, "gossip: "+text)
	return len(b), nil
}
