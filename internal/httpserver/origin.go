package httpserver

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// checked refuses what a web page may have the browser of a user of this host send: requests
// by a name that the page's owner has pointed at loopback (DNS rebinding), and requests from
// pages of another origin. Programs set neither Origin nor Sec-Fetch-Site.
func (s *Server) checked(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.loopback && !s.named(r.Host) {
			s.port.count(Host)
			w.Header().Set("Connection", "close")
			http.Error(w, fmt.Sprintf("host %q: this port is bound to loopback and answers to localhost, addresses of loopback and its advertised name only", r.Host), http.StatusMisdirectedRequest)
			return
		}
		if !sameOrigin(r) {
			s.port.count(Origin)
			w.Header().Set("Connection", "close")
			http.Error(w, "a request from a web page of another origin", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// named says whether a Host is one of a port on loopback.
func (s *Server) named(host string) bool {
	name := hostname(host)
	if a, err := netip.ParseAddr(name); err == nil {
		return a.Unmap().IsLoopback() || slices.Contains(s.Hosts, name)
	}
	return name == "localhost" || slices.ContainsFunc(s.Hosts, func(h string) bool { return strings.EqualFold(hostname(h), name) })
}

// hostname is a Host without its port, in lower case.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// sameOrigin admits requests of programs, of this port's own pages, and links that a user
// follows to a page of it.
func sameOrigin(r *http.Request) bool {
	if origins := r.Header.Values("Origin"); len(origins) > 0 {
		u, err := url.Parse(origins[0])
		if len(origins) > 1 || err != nil || !strings.EqualFold(u.Host, r.Host) {
			return false
		}
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin", "none":
		return true
	}
	return r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
}
