package client

import (
	"context"
	"errors"
	"slices"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// caller adds to each call of a controller the credentials of the caller, and the user or job for
// which the call is made.
func (cfg *Config) caller() connect.Interceptor {
	if cfg.user != "" {
		return agentauth.ForUser(cfg.Token, cfg.Tenant, cfg.user)
	}
	return agentauth.ForJob(cfg.Token, cfg.Tenant, cfg.job)
}

// UserGrant is what a user of a gateway may do in a tenant with keys that begin with a prefix.
type UserGrant struct {
	Identity string // redis:NAME
	Tenant   string
	Prefix   string
	Read     bool
	Write    bool
}

// UserGrants are those of all users of gateways. For package gateway/redis.
//
// Errors: *connect.Error if this program is no gateway; ErrUnreachable.
func (c *Client) UserGrants(ctx context.Context) ([]UserGrant, error) {
	res, err := request(c.control, ctx, &quarrypb.ListUserGrantsRequest{}, quarrypbconnect.ControllerClient.ListUserGrants)
	if err != nil {
		return nil, err
	}
	var out []UserGrant
	for _, t := range res.Tenants {
		for _, g := range t.Grants {
			out = append(out, UserGrant{Identity: g.Identity, Tenant: t.Name, Prefix: g.Prefix,
				Read: slices.Contains(g.Rights, quarrypb.Right_RIGHT_READ), Write: slices.Contains(g.Rights, quarrypb.Right_RIGHT_WRITE)})
		}
	}
	return out, nil
}

// ConnectUser opens a session for a user of this gateway in a tenant, with the rights of the user's grants
// there: a read-only one where it may only read. Errors are those of Connect.
func (c *Client) ConnectUser(ctx context.Context, identity, tenant string, readOnly bool) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if identity == "" || tenant == "" {
		return nil, errors.New("client: a session for a user without an identity or a tenant")
	}
	cfg := c.cfg
	cfg.Tenant, cfg.user, cfg.ReadOnly = tenant, identity, readOnly
	return Connect(ctx, cfg)
}

// ConnectAs opens a session for another caller, with a token of that caller and without this program's own token and certificate:
// the session has the caller's rights, and no other. Connections to storage nodes show this program's certificate, as
// they always do; what they may do there is what the session may. Errors are those of Connect, and ErrArgument without a token.
func (c *Client) ConnectAs(ctx context.Context, token, tenant string, readOnly bool) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if token == "" {
		return nil, badConfig("a session for another caller without its token")
	}
	cfg := c.cfg
	cfg.Token, cfg.Tenant, cfg.ReadOnly, cfg.user, cfg.job = token, tenant, readOnly, "", 0
	if cfg.TLS != nil {
		cfg.TLS = cfg.TLS.Clone()
		cfg.TLS.Certificates, cfg.TLS.GetClientCertificate = nil, nil
	}
	return Connect(ctx, cfg)
}
