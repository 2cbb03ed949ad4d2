package rights

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/identity"
)

// Caller is what a server knows of a call's sender.
type Caller struct {
	// Name for people and logs: an identity, "token ID", "the cluster's token", "anyone".
	Name string
	// Roles that it has.
	Roles []identity.Role
	// ID of its certificate; none if it has shown a token.
	ID identity.ID
	// Token is the id of a token of one role that it has shown; "" for none.
	Token string
	// Node is the one node that the caller can be, by its certificate or by a token that names it; "" for any node.
	Node string
	// Shown is a hash of the cluster's token, or of the authority of the certificate, that it has shown; "" for neither.
	Shown string
	// User is the name of a gateway's user that the caller stands for; "" for none. It has no role.
	User string
}

// Is says whether the caller has one of the roles.
func (c Caller) Is(roles ...identity.Role) bool {
	return slices.ContainsFunc(roles, func(r identity.Role) bool { return slices.Contains(c.Roles, r) })
}

type callerKey struct{}

// known is what is found out of a call.
type known struct {
	caller Caller
	err    error
}

// Identify identifies the caller, for Allow and From. It refuses nothing.
func Identify(who func(*http.Request) (Caller, error), next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := who(r)
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, known{c, err})))
	})
}

// From is the caller of a call that Allow has let pass.
func From(ctx context.Context) Caller {
	k, _ := ctx.Value(callerKey{}).(known)
	return k.caller
}

// Allow refuses the call of a method with an error of package connect, unless its caller is known
// and has a role that the table gives the method. It does not read the request's body.
func Allow(r *http.Request) error {
	k, ok := r.Context().Value(callerKey{}).(known)
	if !ok {
		return connect.NewError(connect.CodeUnauthenticated, errors.New("the caller is not known"))
	}
	if k.err != nil {
		return connect.NewError(connect.CodeUnauthenticated, k.err)
	}
	rule, ok := table[r.URL.Path]
	if !ok || !k.caller.Is(rule.roles...) {
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("%s may not call %s: it is for %v", k.caller.Name, r.URL.Path, rule.roles))
	}
	return nil
}
