// Package identity says which process is at the other end of a connection.
//
// An identity is a URI in an X.509 certificate, spiffe://CLUSTER/ROLE/NAME: the URI SAN
// that SPIRE, step-ca and cert-manager write as well as this package's Authority. CLUSTER is
// the trust domain, ROLE one of Roles, NAME a node's, controller's or user's name.
//
//	src, err := identity.Open(identity.Files{Cert: "n1.crt", Key: "n1.key", CA: "ca.crt"}, log)
//	listener = preauth.Listen(listener, src.Server())
//	client := &http.Transport{TLSClientConfig: src.Client(identity.Controller)}
//
// A Source looks at its files at every handshake and reads those that have changed, so that
// certificates and authorities are replaced without a restart. Connections that are open go on.
package identity
