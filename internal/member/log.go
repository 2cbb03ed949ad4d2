package member

import (
	"context"
	"log"
	"log/slog"
	"strings"
	"sync"
)

// lines hands memberlist's lines to slog. What it warns of is what gossip is there
// to find, and what it calls an error is a stranger's packet, as many of them as the
// stranger likes: neither is an error of ours.
type lines struct {
	mu  sync.Mutex
	log *slog.Logger // nil: nobody listens
}

func (w *lines) logger() *log.Logger { return log.New(w, "", 0) }

// stop lets no line through any more: memberlist does not wait for its goroutines.
func (w *lines) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = nil
}

func (w *lines) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.log != nil {
		w.log.Log(context.Background(), slog.LevelDebug, "gossip: "+strings.TrimPrefix(strings.TrimSpace(string(b)), "[ERR] "))
	}
	return len(b), nil
}
