// Package httpserver is net/http's server with the limits that every HTTP port of a
// Quarry process has, and with a Shutdown that does not wait for connections that have
// carried no request.
//
// net/http's own Shutdown waits 5 s for each of them. They are ordinary: http.Transport
// dials for a request, and when another connection becomes idle first it sends the request
// there and keeps the new connection for later.
//
//	s := httpserver.New(mux)
//	go s.Serve(listener)
//	...
//	err := s.Shutdown(ctx)
package httpserver
