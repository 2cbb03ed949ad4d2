package controller

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file identifies callers, and decides what depends on the caller beyond the table of
// internal/rights.

// errUnauthenticated is the answer to a caller that shows neither a certificate nor a token.
var errUnauthenticated = errors.New("show a certificate of this cluster (--tls-cert, --tls-key, --tls-ca) or a token (--token or QUARRY_TOKEN): the one shown is wrong, revoked or missing")

// open says whether every caller has every role: no token and no certificates are configured.
func (c *Controller) open() bool { return c.cfg.Token == "" && c.cfg.ID == (identity.ID{}) }

// caller identifies the caller, from its certificate, or from its token if it shows no
// certificate.
func (c *Controller) caller(r *http.Request) (rights.Caller, error) {
	id, err := identity.OfPeer(r.TLS, c.cfg.ID)
	if err != nil {
		return rights.Caller{}, err
	}
	token := r.Header.Get(quarrypb.TokenHeader)
	switch {
	case id != (identity.ID{}):
		return rights.Caller{Name: id.String(), Roles: []identity.Role{id.Role}, ID: id, Node: id.Name, Shown: identity.AuthorityOf(r.TLS)}, nil
	case c.open():
		return rights.Caller{Name: "anyone", Roles: identity.Roles}, nil
	case c.cfg.Token != "" && agentauth.RightToken(c.cfg.Token, token):
		return rights.Caller{Name: "the cluster's token", Roles: identity.Roles, Shown: hashOfToken(c.cfg.Token)}, nil
	case strings.HasPrefix(token, tokenPrefix):
		return c.tokenCaller(r.Context(), token)
	}
	return rights.Caller{}, errUnauthenticated
}

// hashOfToken identifies the cluster's token in records of delegations, so that a new token ends
// them.
func hashOfToken(token string) string {
	sum := sha256.Sum256([]byte("quarry delegation\x00" + token))
	return string(sum[:16])
}

// stillShown says whether what a submitter has shown is still accepted: the cluster's token is
// the same, or the authority of its certificate is trusted. Records of earlier versions have
// neither.
func (c *Controller) stillShown(d *quarrypb.Delegation) bool {
	switch shown := string(d.Shown); {
	case shown == "" || d.Token != "":
		return true
	case d.Role == "":
		return shown == hashOfToken(c.cfg.Token)
	default:
		return c.cfg.Trusts == nil || c.cfg.Trusts(shown)
	}
}

// page lets operators and viewers look at the web pages. A browser shows a certificate, or a
// token as the password of any user name.
func (c *Controller) page(pages http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, password, ok := r.BasicAuth(); ok {
			r.Header.Set(quarrypb.TokenHeader, password)
		}
		caller, err := c.caller(r)
		switch {
		case err != nil:
			w.Header().Set("WWW-Authenticate", `Basic realm="quarry: any name, and a token of role viewer or operator as password"`)
			http.Error(w, "show a certificate or a token of role viewer or operator; the token as password", http.StatusUnauthorized)
		case !caller.Is(identity.Viewer, identity.Operator):
			http.Error(w, fmt.Sprintf("%s may not see the console: it is for [%s %s]", caller.Name, identity.Viewer, identity.Operator), http.StatusForbidden)
		default:
			pages.ServeHTTP(w, r)
		}
	})
}

// denied is the error for a caller without the right to a call.
func denied(format string, args ...any) error {
	return connect.NewError(connect.CodePermissionDenied, fmt.Errorf(format, args...))
}

// mayOpen refuses kinds of sessions that only some roles may have. A new epoch does not wait for
// sessions of checks and of nodes' programs, so clients must not have them.
func mayOpen(c rights.Caller, r *quarrypb.OpenSessionRequest) error {
	switch {
	case r.Program != nil && !c.Is(identity.Node):
		return denied("%s may not open a session of a node's program: it is for [node]", c.Name)
	case r.Program == nil && r.Agent && !c.Is(identity.Operator):
		return denied("%s may not open a session of an agent: it is for [operator]", c.Name)
	case r.Program == nil && !r.Agent && !c.Is(identity.Client, identity.Worker, identity.Gateway, identity.Operator):
		return denied("%s may open sessions of its programs over regions only", c.Name)
	}
	return nil
}

// mayRegister lets a node register only under the name in its certificate, or in its token if
// that has one.
func (c *Controller) mayRegister(caller rights.Caller, n *quarrypb.Node) error {
	switch {
	case caller.Node != "" && n.GetName() != caller.Node:
		return denied("%s may not register node %q: it is of node %s", caller.Name, n.GetName(), caller.Node)
	case caller.ID == (identity.ID{}):
		return nil
	case !strings.HasPrefix(n.GetAgentUrl(), "https://"):
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("node %s: agent URL %q: want https, controllers call nodes of this cluster over TLS only", n.GetName(), n.GetAgentUrl()))
	}
	return nil
}

// maySpeak keeps a node from speaking for another: from sending its heartbeats, and from running
// its programs.
func (c *Controller) maySpeak(caller rights.Caller, node uint32) error {
	if name, ok := c.owners.Load(node); ok && caller.Node != "" && name != caller.Node {
		return denied("%s may not speak for node %s", caller.Name, name)
	}
	return nil
}
