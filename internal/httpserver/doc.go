// Package httpserver is net/http's server with the limits that every HTTP port of a
// Quarry process has:
//
//   - A connection is in the state preAuth until a request on it is authenticated (Known).
//     At most MaxPreAuth connections are; one more closes the oldest of them.
//     Under TLS each may send 32 KiB, handshake and request (package preauth).
//   - Gate authenticates a call by its header before a byte of its body is read, and bounds
//     the body by its procedure.
//   - A port bound to loopback answers only requests whose Host is a name of loopback, or one
//     in Hosts; every port refuses requests that a web page of another origin makes.
//   - Shutdown does not wait for connections that have carried no request. net/http's own waits
//     5 s for each of them. They are ordinary: http.Transport dials for a request, and when
//     another connection becomes idle first it sends the request there and keeps the new
//     connection for later.
//
// Example:
//
//	mux.Handle(path, httpserver.Gate{Allow: allow, MaxBytes: limit}.Before(handler))
//	s := httpserver.New("controller", mux)
//	go s.Serve(listener)
//	...
//	err := s.Shutdown(ctx)
package httpserver
