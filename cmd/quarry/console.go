package main

import (
	"context"
	"errors"
	"sync"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/controller/console"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// console is the web page of a controller in this process.
func (a *app) console() *console.Console {
	j := &jobsView{a: a}
	return console.New(console.Config{Token: a.cli.Token, TLS: a.tls, Jobs: j.list})
}

// jobsView reads jobs for the page. It opens a session only where there are any.
type jobsView struct {
	a     *app
	mu    sync.Mutex // guards store
	store *job.Store
}

// list is the newest jobs. The first call that finds the tree of jobs opens a read-only session, which lasts as
// long as the controller's process.
func (v *jobsView) list(ctx context.Context, controllers []string) ([]console.Job, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.store == nil {
		near := *v.a
		flags := *v.a.cli
		flags.Controller = controllers
		near.cli = &flags
		if _, err := ask(ctx, &near, &quarrypb.LookupNameRequest{Name: job.StateTree}, quarrypbconnect.ControllerClient.LookupName); err != nil {
			return nil, nil //nolint:nilerr // no jobs yet, or the page says that no controller answers
		}
		// For as long as the controller runs: the session ends with the process.
		c, err := near.connect(ctx, func(c *client.Config) { c.ReadOnly, c.Lanes, c.Name = true, 1, "console" })
		if err != nil {
			return nil, err
		}
		if v.store, err = job.Open(ctx, c); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	all, err := v.store.Jobs(ctx)
	rows := make([]console.Job, 0, len(all))
	for i := len(all) - 1; i >= 0 && len(rows) < 50; i-- { // the newest first
		j := all[i]
		rows = append(rows, console.Job{ID: j.ID, Plugin: j.Spec.Plugin, State: string(j.State), Phase: j.Phase, Input: j.Spec.Input.String(), Output: j.Spec.Output, Priority: j.Spec.Priority.String()})
	}
	return rows, err
}
