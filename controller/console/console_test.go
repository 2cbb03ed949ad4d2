package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/controller/console"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// serve serves a console that watches a cluster.
func serve(t *testing.T, c *testcluster.Cluster, cfg console.Config) string {
	return serveBehind(t, c, cfg, func(h http.Handler) http.Handler { return h })
}

// serveBehind serves it behind another handler.
func serveBehind(t *testing.T, c *testcluster.Cluster, cfg console.Config, gate func(http.Handler) http.Handler) string {
	page := console.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { page.Run(ctx, c.Controller.URL()); close(done) }()
	s := httptest.NewServer(gate(page))
	t.Cleanup(func() { s.Close(); cancel(); <-done })
	return s.URL
}

func get(t *testing.T, url string) (int, string) {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	res, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(b)
}

func fill(t *testing.T, c *testcluster.Cluster) {
	cl := c.Connect(client.Config{Replicas: 2})
	for i := range 300 {
		_, err := cl.Alloc(t.Context(), make([]byte, 50<<(i%8)), client.AllocOptions{WriteOnce: i%3 == 0})
		require.NoError(t, err)
	}
}

func TestStateAndBlocks(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	fill(t, c)
	url := serve(t, c, console.Config{Jobs: func(context.Context, []string) ([]console.Job, error) {
		return []console.Job{{ID: 7, Plugin: "words"}}, nil
	}})
	var s console.Snapshot
	require.Eventually(t, func() bool {
		code, body := get(t, url+"/console/state")
		require.Equal(t, http.StatusOK, code)
		s = console.Snapshot{}
		require.NoError(t, json.Unmarshal([]byte(body), &s))
		return len(s.Rates) == 2
	}, patience, 20*time.Millisecond)
	require.Empty(t, s.Error)
	require.Len(t, s.Nodes, 2)
	require.Equal(t, "up", s.Nodes[0].State)
	require.True(t, s.Nodes[0].Answers)
	require.NotZero(t, s.Nodes[0].Lanes["shm"])
	require.Equal(t, uint64(7), s.Jobs[0].ID)
	require.True(t, s.Controllers[0].Leader)
	require.Equal(t, "volatile", s.Nodes[0].Persistence)
	region := s.Regions[0]
	require.Equal(t, "open", region.State)
	require.Equal(t, "objects", region.Holds)
	require.False(t, region.Durable)
	code, body := get(t, url+"/console/blocks?node="+itoa(region.Replicas[0].Node)+"&region="+itoa(region.ID))
	require.Equal(t, http.StatusOK, code)
	opened := 0
	for i := 0; i < len(body); i += 3 {
		if body[i] == 2 {
			opened++
			require.NotZero(t, body[i+2], "block %d has slabs that are taken", i/3)
		}
	}
	require.GreaterOrEqual(t, opened, 8)

	for query, want := range map[string]int{"?node=x&region=1": 400, "?node=1": 400, "?node=1&region=999": 404, "?node=77&region=1": 502} {
		code, _ := get(t, url+"/console/blocks"+query)
		require.Equal(t, want, code, query)
	}
	code, _ = get(t, url+"/nothing")
	require.Equal(t, http.StatusNotFound, code)
}

func itoa(n uint32) string { b, _ := json.Marshal(n); return string(b) }

// browser opens a page in a real one.
func browser(t *testing.T) context.Context {
	if testing.Short() {
		t.Skip("starts a browser; not with -short")
	}
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("needs chromium (apt-get install chromium)")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.WindowSize(1400, 1250),
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(time.Minute))
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	require.NoError(t, chromedp.Do(ctx, chromedp.EmulateViewport(1400, 1250))) // starts it
	return ctx
}

// js evaluates an expression in the page.
func js[T any](t *testing.T, ctx context.Context, expression string) T {
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	require.NoError(t, err, expression)
	return v
}

// shows waits until the page does.
func shows(t *testing.T, ctx context.Context, expression string) {
	t.Helper()
	require.Eventually(t, func() bool { return js[bool](t, ctx, expression) }, patience, 50*time.Millisecond, expression)
}

func open(t *testing.T, ctx context.Context, url string) {
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(url)))
	shows(t, ctx, `document.getElementById('health').textContent === 'healthy'`)
}

// What a person sees: a healthy cluster, its nodes, regions and blocks; then a node
// dies, and the page says so.
func TestPageShowsANodeDie(t *testing.T) {
	ctx := browser(t)
	c := testcluster.New(t, testcluster.Options{Nodes: 3})
	fill(t, c)
	url := serve(t, c, console.Config{})
	open(t, ctx, url)
	shows(t, ctx, `document.querySelectorAll('.node').length === 3 && Number(document.getElementById('map').dataset.blocks) > 0`)
	shows(t, ctx, `document.querySelector('.node polyline').getAttribute('points').includes(' ')`) // two rates
	t.Logf("page loaded in %v ms", js[float64](t, ctx, `performance.getEntriesByType('navigation')[0].loadEventEnd`))
	require.True(t, js[bool](t, ctx, `document.getElementById('error').hidden`))
	nodes := js[string](t, ctx, `document.getElementById('nodes').textContent`)
	for _, want := range []string{"node2", "/dc/rack2/host2", "verbs/s", "memory: volatile"} {
		require.Contains(t, nodes, want)
	}
	js[bool](t, ctx, `paint(Uint8Array.from({length: 3 * 2048}, (_, i) => [2, i / 3 % 51, i][i % 3])), true`)
	sizes := js[[]int](t, ctx, `classBytes`)
	require.Len(t, sizes, proto.Classes)
	for c, bytes := range sizes {
		require.Equal(t, proto.Class(c).Bytes(), bytes)
	}
	require.Equal(t, "2048", js[string](t, ctx, `document.getElementById('map').dataset.blocks`))
	for kind, want := range map[proto.Kind]string{proto.Pair: "mutable", proto.Single: "write-once", proto.Staged: "mutable, staged"} {
		require.Equal(t, want, js[string](t, ctx, fmt.Sprintf(`kindOf(%d << 6 | 17)`, kind)))
	}
	t.Logf("2048 blocks painted in %s ms", js[string](t, ctx, `document.getElementById('map').dataset.paintMs`))
	shows(t, ctx, `document.getElementById('map').dataset.blocks !== '2048'`) // the cluster's again
	picture(t, ctx, "console.png")

	require.NoError(t, c.Nodes[1].Close())
	shows(t, ctx, `document.querySelector('[data-node="node2"]').className !== 'node up'`)
	shows(t, ctx, `document.getElementById('health').textContent === 'degraded'`)
	shows(t, ctx, `document.getElementById('events').textContent.includes('node node2 is')`)
	picture(t, ctx, "console-node-lost.png")
}

// TestPageOpensByAnAddressWithAToken: quarry dev prints such an address. A page may not fetch URLs that
// have credentials in them, and relative ones take those of the page.
func TestPageOpensByAnAddressWithAToken(t *testing.T) {
	ctx := browser(t)
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	url := serveBehind(t, c, console.Config{}, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, password, _ := r.BasicAuth(); password != "secret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="quarry"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	open(t, ctx, strings.Replace(url, "://", "://quarry:secret@", 1))
	shows(t, ctx, `document.querySelectorAll('.node').length === 1`)
	require.True(t, js[bool](t, ctx, `document.getElementById('error').hidden`))
}

func TestPageSaysThatNobodyAnswers(t *testing.T) {
	ctx := browser(t)
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	open(t, ctx, serve(t, c, console.Config{}))
	require.NoError(t, c.Controller.Close())
	shows(t, ctx, `document.getElementById('health').textContent === 'no controller answers'`)
	require.Contains(t, js[string](t, ctx, `document.getElementById('error').textContent`), "what follows is older")
}

// picture keeps a screenshot where QUARRY_PICTURES says: those of the documentation.
func picture(t *testing.T, ctx context.Context, name string) {
	dir := os.Getenv("QUARRY_PICTURES")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), png, 0o644))
}
