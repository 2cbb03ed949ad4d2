package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/internal/control"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// completeCmd prints the values of a flag or of a command's argument, one a line: those of
// its enum, or what the cluster has. Scripts made by completion call it. It prints nothing
// where nothing is known, or where no controller answers soon.
type completeCmd struct {
	Path string `arg:"" help:"The command, its words separated by spaces."`
	Flag string `arg:"" optional:"" help:"The flag whose value is wanted; without, the argument."`
}

const (
	completeTimeout = time.Second
	mostValues      = 200
)

// Run prints at most mostValues words. Words with blanks are left out, because the shells' scripts split at
// blanks.
func (c *completeCmd) Run(ctx context.Context, a *app) error {
	n := a.parser.Model.Node
	for _, word := range strings.Fields(c.Path) {
		if n = child(n, word); n == nil {
			return nil
		}
	}
	v := completed(n, c.Flag)
	if v == nil {
		return nil
	}
	var words []string
	if v.Enum != "" {
		words = v.EnumSlice()
	} else {
		a.cli.Timeout = completeTimeout
		words = a.valuesOf(ctx, v.Tag.Get("complete"))
	}
	for _, w := range words[:min(len(words), mostValues)] {
		if !strings.ContainsAny(w, " \t\n") {
			fmt.Fprintln(a.out, w)
		}
	}
	return nil
}

// completed is the value that a flag, or the first argument, of a command takes.
func completed(n *kong.Node, flag string) *kong.Value {
	if flag == "" {
		if len(n.Positional) > 0 {
			return n.Positional[0]
		}
		return nil
	}
	for ; n != nil; n = n.Parent {
		flags := n.Flags
		if n.DefaultCmd != nil {
			flags = append(flags[:len(flags):len(flags)], n.DefaultCmd.Flags...)
		}
		for _, f := range flags {
			if flag == "--"+f.Name || f.Short != 0 && flag == "-"+string(f.Short) {
				return f.Value
			}
		}
	}
	return nil
}

// valuesOf are the things of one kind that the cluster has; none if it does not answer.
// The kinds are those of the struct tag "complete".
func (a *app) valuesOf(ctx context.Context, kind string) (words []string) {
	add := func(word any) { words = append(words, fmt.Sprint(word)) }
	switch kind {
	case "space":
		for _, r := range askQuietly(ctx, a, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status).GetTable().GetRegions() {
			if p := r.GetSpace(); p != nil && p.Index == 0 {
				add(p.Name)
			}
		}
	case "node", "region":
		s := askQuietly(ctx, a, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
		if kind == "region" {
			for _, r := range s.GetTable().GetRegions() {
				add(r.Id)
			}
			break
		}
		for _, n := range s.GetTable().GetNodes() {
			add(n.Name)
		}
	case "controller":
		for _, m := range askQuietly(ctx, a, &quarrypb.ListControllersRequest{}, quarrypbconnect.ControllerClient.ListControllers).GetMembers() {
			add(m.Name)
		}
	case "name", "tree", "pool", "target":
		q := &quarrypb.ListNamesRequest{Limit: mostValues}
		switch kind {
		case "tree":
			q.Kind = kv.NameKind
		case "pool":
			q.Kind = pool.NameKind
		}
		for _, n := range askQuietly(ctx, a, q, quarrypbconnect.ControllerClient.ListNames).GetNames() {
			if kind == "target" {
				n.Name = "@" + n.Name
			}
			add(n.Name)
		}
	case "job":
		_ = a.jobs(ctx, completeTimeout, func(ctx context.Context, s *job.Store) error {
			all, err := s.Jobs(ctx)
			for _, j := range all {
				add(j.ID)
			}
			return err
		})
	case "tenant":
		for _, t := range askQuietly(ctx, a, &quarrypb.ListTenantsRequest{}, quarrypbconnect.ControllerClient.ListTenants).GetTenants() {
			add(t.Name)
		}
	case "session":
		for _, x := range askQuietly(ctx, a, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions).GetSessions() {
			add(x.Session)
		}
	}
	return words
}

// askQuietly is ask for completion, which prints no errors: the answer is nil where there is none.
func askQuietly[Q, A any](ctx context.Context, a *app, q *Q, method control.Method[Q, A]) *A {
	answer, err := ask(ctx, a, q, method)
	if err != nil {
		return nil
	}
	return answer
}
