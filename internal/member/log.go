package member

import (
	"context"
	"log"
	"log/slog"
	"strings"
)

// lines hands memberlist's lines to slog. What it warns of is what gossip is there
// to find, and what it calls an error is a stranger's packet, as many of them as the
// stranger likes: neither is an error of ours.
type lines struct{ log *slog.Logger }

func quiet(l *slog.Logger) *log.Logger { return log.New(lines{l}, "", 0) }

func (w lines) Write(b []byte) (int, error) {
	if w.log == nil {
		return len(b), nil
	}
	text := strings.TrimSpace(string(b))
	if rest, is := strings.CutPrefix(text, "[ERR] "); is {
		text = rest
	}
	w.log.Log(context.Background(), slog.LevelDebug, "gossip: "+text)
	return len(b), nil
}
