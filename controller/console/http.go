package console

import (
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

//go:embed web
var web embed.FS

func (c *Console) routes() http.Handler {
	files, err := fs.Sub(web, "web")
	if err != nil {
		panic(err) // embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /console/state", c.state)
	mux.HandleFunc("GET /console/blocks", c.blocks)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

func (c *Console) state(w http.ResponseWriter, r *http.Request) {
	opens := !c.open()
	c.mu.Lock()
	c.last = time.Now()
	old := opens || time.Since(c.snap.At) > 2*every
	b, err := json.Marshal(c.snap)
	c.mu.Unlock()
	if old {
		select {
		case c.look <- struct{}{}:
		default:
		}
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}

func (c *Console) blocks(w http.ResponseWriter, r *http.Request) {
	node, err := strconv.ParseUint(r.FormValue("node"), 10, 32)
	region, err2 := strconv.ParseUint(r.FormValue("region"), 10, 32)
	if err != nil || err2 != nil {
		http.Error(w, "want ?node=NUMBER&region=NUMBER", http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), askFor)
	defer cancel()
	l, err := ask(ctx, c, &quarrypb.InspectNodeRequest{Node: uint32(node), MapOf: new(uint32(region))}, quarrypbconnect.ControllerClient.InspectNode)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	for _, m := range l.Regions {
		if m.Region == uint32(region) {
			w.Header().Set("Content-Type", "application/octet-stream")
			_, _ = w.Write(m.Blocks)
			return
		}
	}
	http.Error(w, fmt.Sprintf("node %d has no replica of region %d", node, region), http.StatusNotFound)
}
