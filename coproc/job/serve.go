package job

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

const (
	// pollEvery is how often a worker asks for jobs.
	pollEvery = 250 * time.Millisecond
	// maxServed is how many jobs a worker has a session for at a time: the oldest.
	maxServed = 16
	// orphanAfter is when a delegation without a job is ended: its submitter died in between.
	orphanAfter = time.Minute
)

// Serve runs parts of jobs until the context ends. A worker whose certificate or token is of role worker has no
// rights but those of the jobs' submitters: for each job it opens a session in the submitter's tenant, with the
// submitter's rights, as long as the delegation lasts. Where the worker may do everything by itself, Serve is
// Work with a client of control's. ready is called once the controllers have answered, with that client, or nil.
func Serve(ctx context.Context, cfg Config, control client.Config, ready func(own *client.Client) error) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	jobs, err := client.NewJobs(control)
	if err != nil {
		return err
	}
	defer jobs.Close()
	me := client.Worker{Name: cfg.Name, Node: cfg.Node, Host: hostname(), Plugins: encode(coproc.Registered())}
	list, all, err := jobs.Poll(ctx, me)
	if err != nil {
		return err
	}
	if all {
		if cfg.Client, err = client.Connect(ctx, control); err != nil {
			return err
		}
		if err = ready(cfg.Client); err == nil {
			err = Work(ctx, cfg)
		}
		return errors.Join(err, cfg.Client.Close())
	}
	if err := ready(nil); err != nil {
		return err
	}
	s := &server{cfg: cfg, jobs: jobs, desk: newDesk(cfg.Slots), serving: map[task]serving{}, ended: make(chan task)}
	cfg.Tally.begin(cfg.Name, cfg.Slots)
	ctx, stop := s.cfg.drained(ctx)
	defer stop()
	s.loop(ctx, me, list)
	return nil
}

// task is a job in its tenant.
type task struct {
	tenant string // name
	job    uint64 // number in that tenant
}

// serving is what a worker for a job was started with.
type serving struct {
	stop context.CancelFunc // ends the worker
	by   *client.Delegation // for which it acts
}

// server has a worker for each job that it serves. Its loop owns it.
type server struct {
	cfg     Config           // of each worker
	jobs    *client.Jobs     // polls the controllers
	desk    *desk            // slots of the process, shared by its workers
	serving map[task]serving // workers that run
	ended   chan task        // workers that have ended
}

// loop starts and ends workers as the controllers' delegations say, until no part is to be begun any more, and waits for those that run then.
func (s *server) loop(ctx context.Context, me client.Worker, list []*client.Delegation) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for !s.cfg.draining() {
		s.follow(ctx, list)
		for waits := true; waits; {
			select {
			case t := <-s.ended:
				delete(s.serving, t)
			case <-tick.C:
				waits = false
			case <-s.cfg.ending:
				waits = false
			}
		}
		if s.cfg.draining() {
			break
		}
		fresh, _, err := s.jobs.Poll(ctx, me)
		switch {
		case err == nil:
			list = fresh
		case ctx.Err() == nil:
			s.cfg.Logger.Warn("jobs cannot be listed", "error", err)
		}
	}
	for len(s.serving) > 0 { // they begin no part any more, and end with ctx at the latest
		delete(s.serving, <-s.ended)
	}
}

// follow begins to serve the jobs of a list, and ends what is not in it.
func (s *server) follow(ctx context.Context, list []*client.Delegation) {
	listed := map[task]bool{}
	for _, d := range list {
		t := task{d.Tenant, d.Job}
		now, ok := s.serving[t]
		listed[t] = !ok || now.by.Same(d) // else its grants have changed: it is served anew
		if ok || !s.mayServe(d.Tenant) {
			continue
		}
		jctx, stop := context.WithCancel(ctx)
		s.serving[t] = serving{stop, d}
		go func() {
			defer stop()
			if err := s.serve(jctx, d); err != nil && jctx.Err() == nil {
				s.cfg.Logger.Warn("job cannot be served", "job", d.Job, "tenant", d.Tenant, "error", err)
			}
			s.ended <- t
		}()
	}
	for t, now := range s.serving {
		if !listed[t] {
			now.stop()
		}
	}
}

// mayServe bounds the jobs of one tenant to three times those that could be served beside: some are left for
// other tenants, however many jobs of it never end.
func (s *server) mayServe(tenant string) bool {
	n := 0
	for t := range s.serving {
		if t.tenant == tenant {
			n++
		}
	}
	return n < 3*(maxServed-len(s.serving))
}

// serve works for one job, under a session of its own.
func (s *server) serve(ctx context.Context, d *client.Delegation) (err error) {
	defer survive(&err)
	c, err := s.jobs.Connect(ctx, d.Job, d.Tenant)
	if err != nil {
		return err
	}
	cfg := s.cfg
	cfg.Client = c
	timely := time.AfterFunc(time.Until(d.Expires), func() {
		tctx := context.WithoutCancel(ctx)
		if store, err := Open(tctx, c); err == nil {
			_ = store.end(tctx, d.Job, Failed, fmt.Sprintf("its delegation ended at %s: submit it with a longer --lasts", d.Expires.UTC().Format(time.RFC3339)))
		}
	})
	defer timely.Stop()
	return errors.Join(work(ctx, cfg, d, s.desk), c.Close())
}

// over says whether the job that the worker acts for needs it no more, and ends its delegation then.
func (w *worker) over(ctx context.Context) bool {
	d := w.store.d
	if _, err := w.store.t.Get(ctx, activeKey(d.Job), nil); !errors.Is(err, btree.ErrNoKey) {
		return false
	}
	j, err := w.store.read(ctx, d.Job)
	switch {
	case errors.Is(err, errDamaged): // refused
	case errors.Is(err, ErrNoJob) && w.still(fmt.Sprint("orphan/", d.Job), 0) > orphanAfter:
	case err != nil || !j.State.Ended():
		return false // it is being submitted
	}
	if err := w.c.Jobs().End(ctx, d.Job, false); err != nil {
		w.Logger.Warn("delegation is not ended", "job", d.Job, "error", err)
		return false
	}
	return true
}

// refuse ends a job whose records were changed. What damaged records name is not freed.
func (w *worker) refuse(ctx context.Context, id uint64, why error) {
	w.Logger.Warn("job is refused", "job", id, "error", why)
	err := w.store.end(ctx, id, Failed, why.Error())
	if errors.Is(why, errDamaged) {
		leave := w.c.Jobs().Leave(ctx, id)
		if leave == nil {
			leave = w.retire(ctx, id, Failed, true)
		}
		err = errors.Join(err, leave)
	}
	if err != nil {
		w.Logger.Warn("job is not ended", "job", id, "error", err)
	}
}

// mayWrite refuses to change a tree that the submitter may not.
func (w *worker) mayWrite(name string) error {
	if d := w.store.d; d != nil && !d.MayWrite(name) {
		return fmt.Errorf("tree %q: %w: %s may not write it in tenant %s", name, coproc.ErrOutside, d.Submitter, d.Tenant)
	}
	return nil
}
