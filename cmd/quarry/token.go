package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Make a token and print it; it is not kept, and cannot be shown again."`
	List   tokenListCmd   `cmd:"" help:"List tokens, without what they are."`
	Revoke tokenRevokeCmd `cmd:"" help:"Revoke a token. Sessions that were opened with it go on: quarry session revoke ends them."`
}

// tokenView is what is known of a token.
type tokenView struct {
	ID      string    `json:"id"`
	Role    string    `json:"role"`
	Note    string    `json:"note"`
	Node    string    `json:"node,omitempty"`
	Created time.Time `json:"created"`
	Token   string    `json:"token,omitempty"`
}

func tokenOf(t *quarrypb.Token) tokenView {
	return tokenView{ID: t.GetId(), Role: t.GetRole(), Note: t.GetNote(), Node: t.GetNode(), Created: time.Unix(t.GetCreatedUnix(), 0).UTC()}
}

type tokenCreateCmd struct {
	Role string `required:"" enum:"client,node,worker,gateway,viewer,operator" help:"client, node, worker, gateway, viewer (sees status and the console, changes nothing) or operator."`
	Note string `placeholder:"TEXT" help:"What it is for."`
	Node string `placeholder:"NAME" help:"With --role node: the one node that may show it. Without, a token of role node is every node's."`
}

func (c *tokenCreateCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.CreateTokenRequest{Role: c.Role, Note: c.Note, Node: c.Node}, quarrypbconnect.ControllerClient.CreateToken)
	if err != nil {
		return err
	}
	v := tokenOf(res.Token)
	v.Token = res.Secret
	return a.print(v, func(w io.Writer) { fmt.Fprintln(w, res.Secret) })
}

type tokenListCmd struct{}

func (*tokenListCmd) Run(ctx context.Context, a *app) error {
	res, err := ask(ctx, a, &quarrypb.ListTokensRequest{}, quarrypbconnect.ControllerClient.ListTokens)
	if err != nil {
		return err
	}
	list := []tokenView{}
	for _, t := range res.Tokens {
		list = append(list, tokenOf(t))
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "TOKEN\tROLE\tNODE\tCREATED\tNOTE")
		for _, t := range list {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", t.ID, t.Role, cmp.Or(t.Node, "-"), t.Created.Format(time.DateTime), t.Note)
		}
	})
}

type tokenRevokeCmd struct {
	ID string `arg:"" name:"id" help:"Id as quarry token list shows it; the digits behind qt_ in a token."`
}

func (c *tokenRevokeCmd) Run(ctx context.Context, a *app) error {
	if _, err := ask(ctx, a, &quarrypb.RevokeTokenRequest{Id: c.ID}, quarrypbconnect.ControllerClient.RevokeToken); err != nil {
		return err
	}
	return a.print(map[string]any{"id": c.ID, "state": "revoked"}, func(w io.Writer) { fmt.Fprintf(w, "token %s is revoked\n", c.ID) })
}

type auditCmd struct {
	Most uint32 `default:"50" placeholder:"N" help:"Most entries; the cluster keeps the latest 1000."`
}

// auditView is one entry.
type auditView struct {
	Time    time.Time `json:"time"`
	Method  string    `json:"method"`
	Caller  string    `json:"caller"`
	Remote  string    `json:"remote"`
	Request string    `json:"request"`
	Outcome string    `json:"outcome"`
}

func (c *auditCmd) Run(ctx context.Context, a *app) error {
	if c.Most == 0 {
		return usagef("--most 0: want at least 1")
	}
	res, err := ask(ctx, a, &quarrypb.ListAuditRequest{Most: c.Most}, quarrypbconnect.ControllerClient.ListAudit)
	if err != nil {
		return err
	}
	list := []auditView{}
	for _, e := range res.Entries {
		list = append(list, auditView{time.UnixMilli(e.UnixMs).UTC(), e.Method, e.Caller, e.Remote, e.Request, e.Outcome})
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "TIME\tMETHOD\tCALLER\tREMOTE\tREQUEST\tOUTCOME")
		for _, e := range list {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Time.Format(time.DateTime), e.Method, e.Caller, e.Remote, e.Request, e.Outcome)
		}
	})
}
