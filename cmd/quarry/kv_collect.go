package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
)

type kvCollectCmd struct {
	DryRun bool `help:"List what would be freed, and free nothing."`
}

func (x *kvCollectCmd) Run(ctx context.Context, a *app) error {
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	bar := a.progress("looking at blocks")
	o, err := kv.Collect(ctx, c, x.DryRun, func(ctx context.Context, found func(kv.Stray)) error {
		defer bar.end()
		tenant := c.Tenant() // the names of others are not known here, and their objects no strays
		rep, err := a.objects(ctx, nil, &tenant, bar.set, found)
		if err != nil {
			return err
		}
		return rep.Hidden()
	})
	if err = errors.Join(ifInterrupted(ctx, err, "%d nodes and values are freed; the next collect frees the rest", o.Strays), c.Close()); err != nil {
		return err
	}
	return a.print(o, func(w io.Writer) {
		verb := "freed"
		if x.DryRun {
			verb = "would be freed"
		}
		fmt.Fprintf(w, "%d trees, %d objects of theirs; %s: %d nodes and values, %s\n", o.Trees, o.Reached, verb, o.Strays, bytesText(uint64(o.Bytes)))
	})
}

// objects tells every object of the cluster's regions, or of a tenant's.
func (a *app) objects(ctx context.Context, regions []uint32, tenant *uint32, progress func(done, total int), found func(fsck.Object)) (*fsck.Report, error) {
	cfg := a.fsckConfig(regions, progress, found)
	cfg.Tenant = tenant
	return fsck.Cluster(ctx, cfg)
}

func (a *app) fsckConfig(regions []uint32, progress func(done, total int), found func(fsck.Object)) fsck.Config {
	return fsck.Config{Controllers: a.cli.Controller, Token: a.cli.Token, TLS: a.tls, FabricTLS: a.fabric, Rails: a.cli.Rail, RailPolicy: a.cli.Rails, Transport: a.cli.Transport, Regions: regions, Progress: progress, Object: found}
}

// treePatience bounds the check of a tree while some region is not open: a call for an object
// in such a region may wait until it is.
const treePatience = time.Minute

// checkAllTrees is checkTrees in the tenant of --tenant, or in all.
func (a *app) checkAllTrees(ctx context.Context, rep *fsck.Report) ([]treeView, error) {
	tenants, err := a.tenants(ctx)
	if err != nil {
		return nil, err
	}
	views := []treeView{}
	for _, tenant := range slices.Sorted(maps.Values(tenants)) {
		v, err := a.checkTrees(ctx, tenant, rep)
		if err != nil {
			return nil, fmt.Errorf("tenant %s: %w", tenant, err)
		}
		views = append(views, v...)
	}
	return views, nil
}

// checkTrees adds to a report what is wrong with the trees of a tenant's placement library.
// Beside writers a tree is only walked: its levels cannot be compared with each other.
func (a *app) checkTrees(ctx context.Context, tenant string, rep *fsck.Report) ([]treeView, error) {
	c, err := a.connectIn(ctx, tenant, readOnly)
	if err != nil {
		return nil, err
	}
	var names []client.Name
	err = c.Names().List(ctx, "", kv.NameKind, func(n client.Name) error {
		names = append(names, n)
		return nil
	})
	views := []treeView{}
	for _, n := range names {
		if err != nil {
			break
		}
		tctx, cancel := ctx, context.CancelFunc(func() {})
		if len(rep.Unchecked) > 0 {
			tctx, cancel = context.WithTimeout(ctx, treePatience)
		}
		t, oerr := kv.Open(tctx, c, n.Name, btree.Config{ReadOnly: true})
		v := treeView{Name: n.Name, Tenant: tenant}
		if oerr == nil {
			v.Survey, oerr = t.Survey(tctx)
		}
		if oerr == nil && !rep.Writers {
			_, oerr = t.Check(tctx, nil)
		}
		late := tctx.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case oerr != nil && !a.stillNamed(ctx, c, n):
			continue // dropped meanwhile
		case errors.Is(oerr, client.ErrKey):
			v.Encrypted = "encrypted: content not checked: " + oneLine(oerr)
		case errors.Is(oerr, client.ErrNotEncrypted):
			v.Unchecked = oneLine(oerr)
		case errors.Is(oerr, client.ErrNotAuthentic), errors.Is(oerr, btree.ErrCorrupt), errors.Is(oerr, btree.ErrFormat), errors.Is(oerr, btree.ErrNoTree), errors.Is(oerr, client.ErrCorrupt), errors.Is(oerr, client.ErrFreed), errors.Is(oerr, kv.ErrNotTree):
			rep.Add(fsck.Finding{Region: n.Ref.Addr.Region(), Where: fmt.Sprintf("tree %s of tenant %s", n.Name, tenant), Kind: fsck.KindTree, What: oneLine(oerr)})
		case len(rep.Unchecked) > 0 && (late || errors.Is(oerr, client.ErrUnreachable)):
			v.Unchecked = oneLine(oerr)
		case oerr != nil:
			err = fmt.Errorf("tree %q: %w", n.Name, oerr)
		}
		views = append(views, v)
	}
	return views, errors.Join(err, c.Close())
}

// stillNamed says whether a name leads where it did.
func (a *app) stillNamed(ctx context.Context, c *client.Client, n client.Name) bool {
	now, err := c.Names().Lookup(ctx, n.Name)
	return !errors.Is(err, client.ErrNoName) && (err != nil || now.Ref == n.Ref)
}

// treeView is a tree in the report of fsck.
type treeView struct {
	Name   string `json:"name"`
	Tenant string `json:"tenant"`
	// Unchecked says why the tree was not checked: a part of it is in a region that is not open.
	Unchecked string `json:"unchecked,omitempty"`
	// Encrypted says that the tree was not checked because this program has no key for it.
	Encrypted string `json:"encrypted,omitempty"`
	kv.Survey
}
