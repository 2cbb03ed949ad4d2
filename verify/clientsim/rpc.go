package clientsim

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// served is a handler that some process answers with.
type served struct {
	proc    *Proc
	handler http.Handler
}

// transport carries the calls of one process.
type transport struct {
	w    *World
	from *Proc
}

// dialError is the error of a dial to an address at which no process listens.
func dialError() error { return &net.OpError{Op: "dial", Net: "sim", Err: errRefused} }

var (
	errRefused = errors.New("connection refused")
	errReset   = errors.New("connection reset by peer")
)

// RoundTrip carries one call. A caller that gives up does not stop the handler at once, so a
// request without an answer may have been carried out.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r.Body.Close()
	}
	w := t.w
	w.mu.Lock()
	to := w.servers[r.URL.Host]
	w.mu.Unlock()
	if to == nil {
		w.log.Debug("no server", "url", r.URL.String())
		if err := w.pause(ctx, t.from.delay()); err != nil {
			return nil, err
		}
		return nil, dialError()
	}
	if err := w.hop(ctx, t.from, to.proc); err != nil {
		return nil, err
	}
	w.count(&w.Counts.Calls)
	if w.opt.Log != nil {
		w.log.Debug("call", "path", r.URL.Path, "from", t.from.Name, "to", to.proc.Name)
	}
	sctx, cancel := context.WithCancel(to.proc.ctx)
	q := r.Clone(sctx)
	q.Body, q.ContentLength, q.RequestURI = io.NopCloser(bytes.NewReader(body)), int64(len(body)), r.URL.RequestURI()
	q.RemoteAddr = t.from.Name + ":1"
	q.ProtoMajor, q.ProtoMinor, q.Proto = 2, 0, "HTTP/2.0"
	if strings.HasSuffix(r.URL.Path, "/WatchTable") || strings.HasSuffix(r.URL.Path, "/WatchNames") {
		return t.stream(ctx, cancel, to, q)
	}
	w.farewell(r.URL.Path, body)
	if w.older.Load() {
		q.Header.Del("Accept-Encoding") // speechless reads the answer
	}
	reset := t.from.chance(w.wild.Load().ResetRPC)
	a := &answer{header: http.Header{}, code: http.StatusOK}
	done := make(chan struct{})
	go func() {
		defer close(done)
		to.handler.ServeHTTP(a, q)
	}()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	select {
	case <-done:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-to.proc.ctx.Done():
		cancel()
		return nil, errReset
	}
	cancel()
	if strings.HasSuffix(r.URL.Path, "/CertifyFence") && a.code == http.StatusOK {
		w.certified(body, a.body.Bytes())
	}
	if a.code != http.StatusOK {
		w.log.Debug("answer", "path", r.URL.Path, "from", to.proc.Name, "code", a.code, "body", a.body.String())
	}
	if strings.HasSuffix(r.URL.Path, "/Heartbeat") && w.older.Load() {
		w.speechless(a)
	}
	if reset {
		return nil, errReset
	}
	if err := w.hop(ctx, to.proc, t.from); err != nil {
		return nil, err
	}
	return a.response(r, io.NopCloser(&a.body)), nil
}

// farewell notes that a client ends a session.
func (w *World) farewell(path string, request []byte) {
	var serial uint64
	how := givenUp
	switch {
	case strings.HasSuffix(path, "/CloseSession"):
		var q quarrypb.CloseSessionRequest
		if proto.Unmarshal(request, &q) == nil {
			serial, how = q.Serial, closed
		}
	case strings.HasSuffix(path, "/RevokeSession"):
		var q quarrypb.RevokeSessionRequest
		if proto.Unmarshal(request, &q) == nil {
			serial = q.Serial
		}
	}
	if serial != 0 {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.over[serial] = max(w.over[serial], how)
	}
}

// said is how the client of a session has ended it.
func (w *World) said(serial uint64) farewell {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over[serial]
}

// certified looks at the answer to a CertifyFence.
func (w *World) certified(request, response []byte) {
	var q quarrypb.CertifyFenceRequest
	var a quarrypb.CertifyFenceResponse
	if err := errors.Join(proto.Unmarshal(request, &q), proto.Unmarshal(response, &a)); err != nil {
		w.fail("an answer to CertifyFence cannot be read: %v", err)
		return
	}
	if a.Fenced {
		w.etcd.mu.Lock()
		defer w.etcd.mu.Unlock()
		w.etcd.fences.certified(q.Session, q.Region)
	}
}

// speechless leaves out of the answer to a heartbeat what controllers of earlier versions do not say: how far names have changed.
func (w *World) speechless(a *answer) {
	var m quarrypb.HeartbeatResponse
	if a.code != http.StatusOK {
		return
	}
	err := proto.Unmarshal(a.body.Bytes(), &m)
	m.NamesRevision, m.TenantNamesRevision = 0, 0
	b, merr := proto.Marshal(&m)
	if err = errors.Join(err, merr); err != nil {
		w.fail("an answer to Heartbeat cannot be read: %v", err)
	}
	a.body.Reset()
	a.body.Write(b)
}

// stream is RoundTrip for a call whose answer goes on.
func (t transport) stream(ctx context.Context, cancel context.CancelFunc, to *served, q *http.Request) (*http.Response, error) {
	pr, pw := io.Pipe()
	s := &streamed{answer: answer{header: http.Header{}, code: http.StatusOK}, t: t, to: to.proc, ctx: q.Context(), pipe: pw, begun: make(chan struct{}), names: strings.HasSuffix(q.URL.Path, "/WatchNames")}
	context.AfterFunc(ctx, func() { cancel(); pr.CloseWithError(context.Canceled) })
	if s.names && t.w.older.Load() {
		cancel()
		s.code = http.StatusNotFound // as for any unknown method
		return s.response(q, http.NoBody), nil
	}
	if s.names && t.from.chance(t.w.wild.Load().Stall) {
		s.stallAt = 2 + t.w.intn(4)
	}
	go func() {
		to.handler.ServeHTTP(s, q)
		s.begin()
		if q.Context().Err() != nil {
			pw.CloseWithError(errReset)
		} else {
			pw.Close()
		}
		cancel()
	}()
	select {
	case <-s.begun:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.response(q, pr), nil
}

// answer is a response that is sent as a whole.
type answer struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

func (a *answer) response(r *http.Request, body io.ReadCloser) *http.Response {
	return &http.Response{Status: http.StatusText(a.code), StatusCode: a.code, Proto: "HTTP/2.0", ProtoMajor: 2, Header: a.header, Body: body, ContentLength: -1, Request: r}
}

// streamed is a response that is sent piece by piece.
type streamed struct {
	answer
	t     transport
	to    *Proc // the process that answers
	ctx   context.Context
	pipe  *io.PipeWriter
	begun chan struct{}
	once  bool
	names bool // it is a stream of names
	// writes are those so far. That number stallAt does not arrive, and none behind it, though the connection stays.
	writes, stallAt int
}

func (s *streamed) begin() {
	if !s.once {
		s.once = true
		close(s.begun)
	}
}

func (s *streamed) Flush() { s.begin() }

func (s *streamed) Write(b []byte) (int, error) {
	s.begin()
	if s.writes++; s.stallAt > 0 && s.writes >= s.stallAt || s.names && s.t.w.older.Load() {
		<-s.ctx.Done()
		return 0, s.ctx.Err()
	}
	if err := s.t.w.hop(s.ctx, s.to, s.t.from); err != nil {
		return 0, err
	}
	return s.pipe.Write(b)
}
