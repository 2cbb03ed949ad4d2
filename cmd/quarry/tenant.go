package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type tenantCmd struct {
	Create      tenantCreateCmd      `cmd:"" help:"Make a tenant: quarry tenant create shop --quota-bytes 8GiB --sessions 100."`
	List        tenantListCmd        `cmd:"" help:"List tenants: quotas and what is used of them."`
	Set         tenantSetCmd         `cmd:"" help:"Change quotas: quarry tenant set shop --quota-bytes 16GiB."`
	Delete      tenantDeleteCmd      `cmd:"" help:"Delete a tenant: an empty one, or with --with-data one with all that it holds."`
	Grant       tenantGrantCmd       `cmd:"" help:"Let an identity work in a tenant: quarry tenant grant shop --identity client/app --rights read,write,create."`
	RevokeGrant tenantRevokeGrantCmd `cmd:"" help:"Take grants away. Sessions that are open go on: quarry session revoke ends them."`
	Grants      tenantGrantsCmd      `cmd:"" help:"List the grants of a tenant."`
}

// tenantView is a tenant as it is printed. A quota of 0 is none.
type tenantView struct {
	Name     string       `json:"name"`
	Deleting bool         `json:"deleting,omitempty"`
	Regions  uint32       `json:"regions"`
	Bytes    tenantAmount `json:"bytes"`
	Sessions tenantAmount `json:"sessions"`
	Lanes    tenantAmount `json:"lanes"`
}

type tenantAmount struct {
	Used  uint64 `json:"used"`
	Quota uint64 `json:"quota"`
}

// text is "used of quota".
func (u tenantAmount) text(show func(uint64) string) string {
	if u.Quota == 0 {
		return show(u.Used)
	}
	return show(u.Used) + " of " + show(u.Quota)
}

func tenantOf(t *quarrypb.Tenant) tenantView {
	u := t.GetUse()
	return tenantView{Name: t.GetName(), Deleting: t.GetDeleting(), Regions: u.GetRegions(), Bytes: tenantAmount{u.GetBytes(), t.GetQuotaBytes()},
		Sessions: tenantAmount{uint64(u.GetSessions()), uint64(t.GetQuotaSessions())}, Lanes: tenantAmount{uint64(u.GetLanes()), uint64(t.GetQuotaLanes())}}
}

func (a *app) printTenants(v any, list ...tenantView) error {
	return a.print(v, func(w io.Writer) { printTenants(w, list) })
}

func printTenants(w io.Writer, list []tenantView) {
	fmt.Fprintln(w, "TENANT\tREGIONS\tBYTES\tSESSIONS\tLANES")
	plain := func(n uint64) string { return fmt.Sprint(n) }
	for _, t := range list {
		name := t.Name
		if t.Deleting {
			name += " (being deleted)"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\n", name, t.Regions, t.Bytes.text(bytesText), t.Sessions.text(plain), t.Lanes.text(plain))
	}
}

// tenants are that of --tenant, or all if none is named: number -> name. One that is being deleted is left out.
func (a *app) tenants(ctx context.Context) (map[uint32]string, error) {
	res, err := ask(ctx, a, &quarrypb.ListTenantsRequest{}, quarrypbconnect.ControllerClient.ListTenants)
	if err != nil {
		return nil, err
	}
	out := map[uint32]string{}
	for _, t := range res.Tenants {
		if !t.Deleting && (a.cli.Tenant == "" || a.cli.Tenant == t.Name) {
			out[t.Id] = t.Name
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no tenant %q: quarry tenant list shows them", a.cli.Tenant)
	}
	return out, nil
}

// tenantNumber is that of the tenant of --tenant; nil if none is named.
func (a *app) tenantNumber(ctx context.Context) (*uint32, error) {
	if a.cli.Tenant == "" {
		return nil, nil
	}
	tenants, err := a.tenants(ctx)
	for number := range tenants {
		return &number, err
	}
	return nil, err
}

// connectIn connects to a tenant. Without a key of it in --key-file, it connects without keys, unless --tenant names the tenant.
func (a *app) connectIn(ctx context.Context, tenant string, change func(*client.Config)) (*client.Client, error) {
	return a.connect(ctx, func(c *client.Config) {
		if c.Tenant == "" && c.Keys != nil {
			list, err := payloadkey.ReadFile(a.cli.KeyFile)
			if err == nil && len(payloadkey.Of(list, tenant)) == 0 {
				c.Keys = nil
			}
		}
		c.Tenant = tenant
		if change != nil {
			change(c)
		}
	})
}

type tenantCreateCmd struct {
	Name       string   `arg:"" help:"Name: at most 63 of a-z, 0-9, - and _."`
	QuotaBytes sizeFlag `placeholder:"SIZE" help:"Most memory of its regions, counted once for each replica, such as 8GiB; 0: no bound."`
	Sessions   uint32   `placeholder:"N" help:"Most sessions at a time; 0: no bound."`
	Lanes      uint32   `placeholder:"N" help:"Most lanes of all its sessions; a client has four for each CPU unless told otherwise; 0: no bound."`
}

func (c *tenantCreateCmd) Run(ctx context.Context, a *app) error {
	t, err := ask(ctx, a, &quarrypb.CreateTenantRequest{Name: c.Name, QuotaBytes: uint64(c.QuotaBytes), QuotaSessions: c.Sessions, QuotaLanes: c.Lanes}, quarrypbconnect.ControllerClient.CreateTenant)
	if err != nil {
		return err
	}
	v := tenantOf(t)
	return a.printTenants(v, v)
}

type tenantListCmd struct{}

func (*tenantListCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListTenantsRequest{}, quarrypbconnect.ControllerClient.ListTenants)
	if err != nil {
		return err
	}
	list := []tenantView{}
	for _, t := range res.Tenants {
		list = append(list, tenantOf(t))
	}
	return a.printTenants(list, list...)
}

type tenantSetCmd struct {
	Name       string    `arg:"" complete:"tenant" help:"Name."`
	QuotaBytes *sizeFlag `placeholder:"SIZE" help:"Most memory of its regions, counted once for each replica; 0: no bound."`
	Sessions   *uint32   `placeholder:"N" help:"Most sessions at a time; 0: no bound."`
	Lanes      *uint32   `placeholder:"N" help:"Most lanes of all its sessions; 0: no bound."`
}

func (c *tenantSetCmd) Run(ctx context.Context, a *app) error {
	if c.QuotaBytes == nil && c.Sessions == nil && c.Lanes == nil {
		return usagef("tenant %s: want --quota-bytes, --sessions or --lanes", c.Name)
	}
	q := &quarrypb.SetTenantRequest{Name: c.Name, QuotaBytes: (*uint64)(c.QuotaBytes), QuotaSessions: c.Sessions, QuotaLanes: c.Lanes}
	t, err := ask(ctx, a, q, quarrypbconnect.ControllerClient.SetTenant)
	if err != nil {
		return err
	}
	v := tenantOf(t)
	return a.printTenants(v, v)
}

type tenantDeleteCmd struct {
	Name     string `arg:"" complete:"tenant" help:"Name."`
	WithData bool   `help:"Confirms that its sessions end, and that its names and all objects in its regions are deleted."`
}

// Run gives the request again until the tenant is gone: each answer says what is left.
func (c *tenantDeleteCmd) Run(ctx context.Context, a *app) error {
	for begun := false; ; begun = true {
		res, err := ask(ctx, a, &quarrypb.DeleteTenantRequest{Name: c.Name, WithData: c.WithData}, quarrypbconnect.ControllerClient.DeleteTenant)
		switch {
		case begun && connect.CodeOf(err) == connect.CodeNotFound: // the answer before was lost
		case begun && err != nil:
			return fmt.Errorf("tenant %s is being deleted, give the command again to see its end: %w", c.Name, err)
		case err != nil:
			return err
		case res.UnderWay:
			fmt.Fprintf(a.errOut, "tenant %s: %d regions and %d sessions are left\n", c.Name, res.Regions, res.Sessions)
			continue
		}
		break
	}
	return a.print(map[string]any{"name": c.Name, "state": "deleted"}, func(w io.Writer) { fmt.Fprintf(w, "tenant %s is deleted\n", c.Name) })
}

// grantView is one grant.
type grantView struct {
	Identity string   `json:"identity"`
	Rights   []string `json:"rights"`
	Prefix   string   `json:"prefix"`
}

func (a *app) printGrants(t *quarrypb.Tenant) error {
	list := []grantView{}
	for _, g := range t.GetGrants() {
		v := grantView{Identity: g.Identity, Rights: []string{}, Prefix: g.Prefix}
		for _, r := range g.Rights {
			v.Rights = append(v.Rights, quarrypb.Word(r))
		}
		list = append(list, v)
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "IDENTITY\tRIGHTS\tPREFIX")
		for _, g := range list {
			fmt.Fprintf(w, "%s\t%s\t%s\n", g.Identity, strings.Join(g.Rights, ","), g.Prefix)
		}
	})
}

type tenantGrantCmd struct {
	Name     string   `arg:"" complete:"tenant" help:"Name of the tenant."`
	Identity string   `required:"" placeholder:"ID" help:"ROLE/NAME of a certificate, token:ID, or role:ROLE; the roles are client, worker and gateway."`
	Rights   []string `required:"" enum:"read,write,create,delete,admin" placeholder:"RIGHTS" help:"What it may do: read, write, create, delete, admin (give more grants to identities that have one); comma separated."`
	Prefix   string   `placeholder:"P" help:"Names that the rights hold for; all if it is not given."`
}

func (c *tenantGrantCmd) Run(ctx context.Context, a *app) error {
	g := &quarrypb.Grant{Identity: c.Identity, Prefix: c.Prefix}
	for _, r := range c.Rights {
		g.Rights = append(g.Rights, quarrypb.Right(quarrypb.Right_value["RIGHT_"+strings.ToUpper(r)]))
	}
	t, err := ask(ctx, a, &quarrypb.GrantRequest{Tenant: c.Name, Grant: g}, quarrypbconnect.ControllerClient.Grant)
	if err != nil {
		return err
	}
	return a.printGrants(t)
}

type tenantRevokeGrantCmd struct {
	Name     string  `arg:"" complete:"tenant" help:"Name of the tenant."`
	Identity string  `required:"" placeholder:"ID" help:"As it was granted."`
	Prefix   *string `placeholder:"P" help:"Only the grant with this prefix."`
}

func (c *tenantRevokeGrantCmd) Run(ctx context.Context, a *app) error {
	t, err := ask(ctx, a, &quarrypb.RevokeGrantRequest{Tenant: c.Name, Identity: c.Identity, Prefix: c.Prefix}, quarrypbconnect.ControllerClient.RevokeGrant)
	if err != nil {
		return err
	}
	return a.printGrants(t)
}

type tenantGrantsCmd struct {
	Name string `arg:"" complete:"tenant" help:"Name of the tenant."`
}

func (c *tenantGrantsCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListTenantsRequest{}, quarrypbconnect.ControllerClient.ListTenants)
	if err != nil {
		return err
	}
	for _, t := range res.Tenants {
		if t.Name == c.Name {
			return a.printGrants(t)
		}
	}
	return fmt.Errorf("no tenant %q: quarry tenant list shows them", c.Name)
}
