package testcluster

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Line is a client's way to the controller. While it is cut requests wait: the client
// does not hear of the end of its lease, and goes on once the line is restored.
type Line struct {
	URL string

	mu     sync.Mutex
	open   chan struct{}            // closed while requests pass
	lose   func(method string) bool // see Lose; may be nil
	broken func(method string) bool // see Break; may be nil
	done   bool                     // broken: after the controller has carried the request out
	late   *late                    // see Late; may be nil
}

// late is a request that has not arrived.
type late struct {
	method string
	held   chan struct{} // closed when a request is held
	arrive chan struct{} // closed when it may arrive
	done   chan struct{} // closed when the controller has answered it
}

// Line makes a way to the controller.
func (c *Cluster) Line() *Line {
	to, err := url.Parse(c.Controller.URL())
	if err != nil {
		c.T.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(to)
	proxy.FlushInterval = -1
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) {} // the caller has given up
	l := &Line{open: make(chan struct{})}
	close(l.open)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		open, lose, broken, done := l.open, l.lose, l.broken, l.done
		late := l.late
		if late != nil && late.method == path.Base(r.URL.Path) {
			l.late = nil
		} else {
			late = nil
		}
		l.mu.Unlock()
		if late != nil {
			late.carry(c.T.Context(), proxy, r)
			panic(http.ErrAbortHandler)
		}
		if lose != nil && lose(path.Base(r.URL.Path)) {
			_, _ = io.Copy(io.Discard, r.Body) // or else the server does not see the connection end
			<-r.Context().Done()
			return
		}
		select {
		case <-open:
			if broken != nil && broken(path.Base(r.URL.Path)) {
				if done {
					proxy.ServeHTTP(httptest.NewRecorder(), r)
				}
				panic(http.ErrAbortHandler)
			}
			proxy.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}))
	c.T.Cleanup(func() { l.Restore(); s.CloseClientConnections(); s.Close() })
	l.URL = s.URL
	return l
}

// Cut holds up the requests from now on.
func (l *Line) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = make(chan struct{})
}

// Lose never answers requests for which lost returns true. lost is called for each request
// with the name of its method, from several goroutines; nil loses none.
func (l *Line) Lose(lost func(method string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lose = lost
}

// Break ends the connections of requests for which broken returns true, without an answer; with done after the
// controller has carried them out. broken is called as Lose does; nil breaks none.
func (l *Line) Break(done bool, broken func(method string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.broken, l.done = broken, done
}

// Late holds the next request of a method. held is closed when it is held; arrive carries it out and returns when the
// controller has answered. The caller's connection ends without the answer.
func (l *Line) Late(method string) (held <-chan struct{}, arrive func()) {
	q := &late{method: method, held: make(chan struct{}), arrive: make(chan struct{}), done: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.late = q
	return q.held, func() { close(q.arrive); <-q.done }
}

// carry holds r and carries it out. The end of the caller's connection does not end it.
func (q *late) carry(test context.Context, proxy http.Handler, r *http.Request) {
	defer close(q.done)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	close(q.held)
	select {
	case <-q.arrive:
	case <-test.Done(): // it has failed
		return
	}
	r = r.Clone(context.WithoutCancel(r.Context()))
	r.Body = io.NopCloser(bytes.NewReader(body))
	proxy.ServeHTTP(httptest.NewRecorder(), r)
}

// Restore lets requests pass again, those that wait too.
func (l *Line) Restore() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.open:
	default:
		close(l.open)
	}
}

// SessionState is what the controller lists of a session, "" if it has no record.
func (c *Cluster) SessionState(id uint32) string {
	res, err := c.Control().ListSessions(c.T.Context(), connect.NewRequest(&quarrypb.ListSessionsRequest{}))
	if err != nil {
		c.T.Fatal(err)
	}
	for _, s := range res.Msg.Sessions {
		if s.Session == id {
			return s.State
		}
	}
	return ""
}

// AwaitSession waits until the controller lists a session in a state, "" for no record.
func (c *Cluster) AwaitSession(id uint32, state string) {
	for end := time.Now().Add(time.Minute); c.SessionState(id) != state; {
		if time.Now().After(end) {
			c.T.Fatalf("session %d is %q, not %q", id, c.SessionState(id), state)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
