package etcdembed

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"sync/atomic"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/etcdhttp"
	"go.etcd.io/etcd/server/v3/etcdserver/api/rafthttp"

	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/identity"
)

// peerPort serves the peer URL of a member: what it tells the others before its first start, then
// etcd's handlers. etcd's own listener bounds neither the number of TLS handshakes nor their bytes.
type peerPort struct {
	server *httpserver.Server
	now    atomic.Pointer[http.Handler] // nil until there is something to tell
}

// listenPeers opens the port. failed is called if it fails later. With https, only controllers
// reach a handler.
func listenPeers(c Config, u *url.URL, failed func(error)) (*peerPort, error) {
	// A write to a stream has a deadline, as with etcd's listener: while one waits, the member
	// cannot replace the stream. Streams and snapshots are read for as long as they take.
	l, err := transport.NewListenerWithOpts(bindable(u).Host, "http", transport.WithTimeout(0, rafthttp.ConnWriteTimeout))
	if err != nil {
		return nil, err
	}
	p := &peerPort{}
	p.server = httpserver.New("etcd", http.HandlerFunc(p.answer))
	p.server.Hosts = []string{u.Host}
	p.server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug) // refused handshakes
	if c.TLS != nil {
		p.server.TLS = c.TLS.ServerFor(identity.Controller)
	}
	go func() {
		if err := p.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			failed(fmt.Errorf("peer URL %s: %w", u, err))
		}
	}()
	return p, nil
}

// answer is for peers: TLS has authenticated them. Without TLS, on loopback alone, nothing does.
func (p *peerPort) answer(w http.ResponseWriter, r *http.Request) {
	httpserver.Known(r.Context())
	h := p.now.Load()
	if h == nil {
		http.Error(w, "this member has not started yet", http.StatusServiceUnavailable)
		return
	}
	(*h).ServeHTTP(w, r)
}

// waits tells peers that this member waits for its first start.
func (p *peerPort) waits(me firstStart) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+firstStartPath, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(me)
	})
	var h http.Handler = mux
	p.now.Store(&h)
}

// serves has a member that runs answer.
func (p *peerPort) serves(e *embed.Etcd) {
	h := etcdhttp.NewPeerHandler(e.GetLogger(), e.Server)
	p.now.Store(&h)
}

// peerIdentity is what a member with a peer URL of https shows the others; nil with http.
func peerIdentity(c Config, peer *url.URL) (*identity.Source, error) {
	switch {
	case peer.Scheme != "https":
		return nil, nil
	case c.TLS != nil && c.TLS.Mutual() && c.TLS.ID().Role == identity.Controller:
		return c.TLS, nil
	case c.Token != "" && (c.TLS == nil || !c.TLS.Mutual()):
		return identity.FromToken(c.Token, filepath.Join(c.Dir, "peer-tls"), c.Name, c.Log)
	}
	return nil, fmt.Errorf("peer URL %s: https needs a controller's certificate and an authority, or a token: --tls-cert, --tls-key and --tls-ca (see quarry cert controller), or --token", c.PeerURL)
}

// peerTLS is for calls of other members. They are verified by the DNS name that only controllers'
// certificates have, for etcd has no place for another check. It reads a replaced certificate at the
// next connection, and a replaced authority when it starts.
func peerTLS(src *identity.Source) transport.TLSInfo {
	f := src.Files()
	return transport.TLSInfo{CertFile: f.Cert, KeyFile: f.Key, TrustedCAFile: f.CA, ServerName: identity.PeerName(src.ID().Cluster)}
}

// bindable is where to listen for a URL: by a name, at all addresses.
func bindable(u *url.URL) *url.URL {
	name, port, err := net.SplitHostPort(u.Host)
	if u.Scheme == "unix" || err != nil || net.ParseIP(name) != nil {
		return u
	}
	return &url.URL{Scheme: u.Scheme, Host: net.JoinHostPort("0.0.0.0", port)}
}
