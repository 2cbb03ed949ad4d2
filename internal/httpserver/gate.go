package httpserver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"connectrpc.com/connect"
)

const (
	// bodyTimeout bounds the reading of a request's body.
	bodyTimeout = 10 * time.Second
	// refusedTimeout bounds how long net/http reads the body of a refused request, and discards
	// it, before it sends the answer.
	refusedTimeout = time.Second
)

// Gate stands in front of the handlers of Connect. It refuses a call before its body is read,
// decompressed or decoded: decoding is what costs memory, up to 40 times the bytes read, and
// decompressing, a thousand times as much.
type Gate struct {
	// Allow refuses calls with an error of package connect. It must not read the body.
	Allow func(*http.Request) error
	// MaxBytes of a request to a path.
	MaxBytes func(path string) int64
	// Body refuses bodies with an error of package connect, before they are decoded. May be nil.
	Body func(r *http.Request, body []byte) error
}

var writer = connect.NewErrorWriter()

// Before is the handler behind the gate. Requests have one message, which is read whole
// within bodyTimeout.
func (g Gate) Before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := g.Allow(r); err != nil {
			if connect.CodeOf(err) == connect.CodeUnauthenticated {
				w.Header().Set("Connection", "close") // the rest of the request is not read
			}
			refuse(w, r, Unauthenticated, err)
			return
		}
		Known(r.Context())
		if name, encoding := compressed(r.Header); encoding != "" {
			w.Header().Set("Connection", "close")
			refuse(w, r, Compressed, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("a request with %s %q: requests are taken uncompressed only", name, encoding)))
			return
		}
		limit := g.MaxBytes(r.URL.Path)
		body, err := read(w, r, limit)
		if err != nil {
			w.Header().Set("Connection", "close")
			refuse(w, r, Large, err)
			return
		}
		if g.Body != nil {
			if err := g.Body(r, body); err != nil {
				refuse(w, r, Unauthenticated, err)
				return
			}
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

// compressed says which header announces a compressed request.
func compressed(h http.Header) (name, encoding string) {
	for _, name := range []string{"Content-Encoding", "Connect-Content-Encoding", "Grpc-Encoding"} {
		if e := h.Get(name); e != "" && e != "identity" {
			return name, e
		}
	}
	return "", ""
}

// read reads the body, which has at most limit bytes.
func read(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	control := http.NewResponseController(w)
	bounded := control.SetReadDeadline(time.Now().Add(bodyTimeout)) == nil // a simulated network has no deadlines
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, tooLarge(limit)
	case err != nil:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the request ends early: %w", err))
	}
	if bounded {
		_ = control.SetReadDeadline(time.Time{})
	}
	return b, nil
}

func tooLarge(limit int64) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("a request of more than %d bytes, the most for this procedure", limit))
}

// refuse answers a call with an error.
func refuse(w http.ResponseWriter, r *http.Request, why Reason, err error) {
	if k, ok := r.Context().Value(connKey{}).(*conn); ok {
		k.s.port.count(why)
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(refusedTimeout))
	_ = writer.Write(w, r, err)
}
