package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type jobCmd struct {
	Run     jobRunCmd     `cmd:"" help:"Run a plugin over a tree or objects, where they are. Example: quarry job run words --input tree:src --output tree:counts"`
	List    jobListCmd    `cmd:"" help:"List jobs."`
	Status  jobStatusCmd  `cmd:"" help:"Show a job and its parts."`
	Logs    jobLogsCmd    `cmd:"" help:"Show what a job's parts have logged."`
	Cancel  jobCancelCmd  `cmd:"" help:"Stop a job."`
	Forget  jobForgetCmd  `cmd:"" aliases:"rm" help:"Remove the records of jobs that have ended; what they have written stays. Example: quarry job forget --older 24h"`
	Quota   jobQuotaCmd   `cmd:"" help:"Show or set what jobs may have between map and reduce, and the jobs that wait for it. Example: quarry job quota 64GiB"`
	Plugins jobPluginsCmd `cmd:"" help:"List workers and the plugins they know, and uploaded modules."`
	Call    jobCallCmd    `cmd:"" help:"Call a function on one object, beside its memory. Example: quarry job call add @visits 1"`
	Put     jobPutCmd     `cmd:"" help:"Upload a WASM module as a plugin."`
	Remove  jobRemoveCmd  `cmd:"" help:"Delete an uploaded module."`
}

// errNoWorker: the tree of jobs, which the first worker makes, is not there.
var errNoWorker = errors.New("no worker is there, nor has there been one")

// jobs runs f with the cluster's jobs.
func (a *app) jobs(ctx context.Context, timeout time.Duration, f func(context.Context, *job.Store) error) error {
	c, err := a.connect(ctx, nil)
	if err != nil {
		return err
	}
	tctx, cancel := ctx, context.CancelFunc(func() {})
	if timeout > 0 {
		tctx, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	// The jobs' tree is made by the first worker with rights of its own, with the replicas of its
	// --replicas; where there are no such workers, by the first program that submits a job.
	if _, err = c.Names().Lookup(tctx, job.StateTree); errors.Is(err, client.ErrNoName) {
		missing := err
		var polling []client.Worker
		if polling, err = c.Jobs().Workers(tctx); err == nil && len(polling) == 0 {
			err = fmt.Errorf("%w: start some with quarry storage --workers 1, or quarry worker: %w", errNoWorker, missing)
		}
	}
	var s *job.Store
	if err == nil {
		s, err = job.Open(tctx, c)
	}
	if err == nil {
		err = f(tctx, s)
	}
	return errors.Join(err, c.Close())
}

type jobRunCmd struct {
	Plugin  string            `arg:"" help:"Plugin; see quarry job plugins."`
	Input   string            `required:"" placeholder:"SOURCE" help:"tree:NAME, redis:NAME[#DATABASE] for the strings of a Redis gateway's tree, or objects:PREFIX of names."`
	From    string            `help:"First key of the tree's part to read."`
	To      string            `help:"End of that part, not included."`
	Output  string            `required:"" placeholder:"tree:NAME" help:"Tree for the output; made if it is not there."`
	Arg     map[string]string `placeholder:"NAME=VALUE" help:"Argument of the plugin; may be repeated."`
	Writes  []string          `placeholder:"TREE" help:"Further trees that the plugin may write."`
	Maps    int               `name:"map-parts" help:"Parts to cut the input into, at most; 0 means four for each worker, and more where a part of a tree would have more than 64 MiB."`
	Most    int               `name:"max-parts" help:"Parts that run at once, at most; 0 means as many as workers have slots. Such a job has no second attempts."`
	Rank    string            `name:"priority" enum:"low,normal,high" default:"normal" help:"Parts of jobs of higher priority begin first; of nine parts that a worker begins, lower priorities get at least one."`
	Reduces int               `name:"reduce-parts" help:"Parts of the reduction; 0 means two for each worker."`
	Limit   time.Duration     `name:"part-timeout" default:"10m" help:"Longest time for one attempt of one part."`
	Memory  sizeFlag          `placeholder:"SIZE" help:"Memory of one instance of a WASM module; default and most are the worker's --module."`
	Compile time.Duration     `name:"compile-timeout" placeholder:"DURATION" help:"Longest time to compile a WASM module; default and most are the worker's --compile-timeout."`
	Shuffle sizeFlag          `placeholder:"SIZE" help:"Budget of records between map and reduce; a job that has more fails. It waits until as much of the quota is free (quarry job quota). Default a quarter of the quota, at most 16GiB."`
	Lasts   time.Duration     `placeholder:"DURATION" help:"How long workers may act for you; a job that takes longer fails. Default a day, at most 30."`
	Keep    time.Duration     `placeholder:"DURATION" help:"How long quarry job status shows the job after its end; default 720h."`
	Replace bool              `help:"Replace the output: its name stands for what the job writes when all of it is written, and nothing of the former content is left."`
	Linger  time.Duration     `placeholder:"DURATION" help:"With --replace: how long programs that have the former content open can go on reading it; default 30s."`
	Wait    bool              `default:"true" negatable:"" help:"Wait for the end."`
}

// Run submits a job. With --wait it follows the job; an interrupt then ends the command and not the job.
func (c *jobRunCmd) Run(ctx context.Context, a *app) error {
	in, err := job.ParseSource(c.Input)
	if err != nil {
		return usagef("--input: %w", err)
	}
	if in.From = []byte(c.From); c.To != "" {
		in.To = []byte(c.To)
	}
	out, ok := strings.CutPrefix(c.Output, "tree:")
	if !ok || out == "" {
		return usagef("--output %q: want tree:NAME", c.Output)
	}
	return a.jobs(ctx, 0, func(ctx context.Context, s *job.Store) error {
		j, err := s.Submit(ctx, job.Spec{Plugin: c.Plugin, Input: in, Output: out, Args: c.Arg, Writes: c.Writes, MapParts: c.Maps, MaxRunning: c.Most, Priority: job.Priority(c.Rank), ReduceParts: c.Reduces, PartTimeout: c.Limit, MemoryBytes: int(c.Memory), CompileTimeout: c.Compile, ShuffleBytes: int64(c.Shuffle), Lasts: c.Lasts, Keep: c.Keep, Replace: c.Replace, Linger: c.Linger})
		if err != nil {
			return err
		}
		if id := j.ID; c.Wait {
			if j, err = a.awaitJob(ctx, s, id); err != nil {
				return ifInterrupted(ctx, err, "job %d goes on: quarry job status %d shows it, quarry job cancel %d ends it", id, id, id)
			}
		}
		err = a.print(j, func(w io.Writer) { jobText(w, j) })
		if err == nil && j.State.Ended() && j.State != job.Done {
			err = fmt.Errorf("job %d is %s: %s", j.ID, j.State, j.Error)
		}
		return err
	})
}

// awaitJob shows a job's progress until it has ended.
func (a *app) awaitJob(ctx context.Context, s *job.Store, id uint64) (*job.Job, error) {
	bar := a.progress(fmt.Sprintf("job %d", id))
	defer bar.end()
	shown := time.Now()
	return s.Follow(ctx, id, func(j *job.Job) error {
		if bar.p == nil || time.Since(shown) < barEvery {
			return nil
		}
		shown = time.Now()
		parts, err := s.Parts(ctx, id, "")
		if err != nil {
			return err
		}
		done := 0
		for _, p := range parts {
			if p.State == job.Done {
				done++
			}
		}
		bar.set(done, 1+j.Maps+j.Reduces)
		return nil
	})
}

// barEvery is how often the parts of a job are read for a progress bar.
const barEvery = 200 * time.Millisecond

// jobView is a job, and what it waits for.
type jobView struct {
	*job.Job
	Priority string `json:"priority"`
	Waits    string `json:"waits,omitempty"` // why no part of it runs
}

func jobText(w io.Writer, j *job.Job) {
	took := "-"
	if !j.Ended.IsZero() {
		took = j.Ended.Sub(j.Created).Round(time.Millisecond).String()
	}
	fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%v\ttree:%s\t%d+%d\t%s\t%s\n", j.ID, j.Spec.Plugin, j.State, j.Phase, j.Spec.Input, j.Spec.Output, j.Maps, j.Reduces, took, j.Spec.Priority)
}

type jobListCmd struct{}

func (jobListCmd) Run(ctx context.Context, a *app) error {
	err := a.listJobs(ctx)
	if errors.Is(err, errNoWorker) { // and so no job
		return a.print([]*job.Job{}, func(w io.Writer) { fmt.Fprintln(w, "no jobs: no worker has been there yet") })
	}
	return err
}

func (a *app) listJobs(ctx context.Context) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		all, err := s.Jobs(ctx)
		if err != nil {
			return err
		}
		quota, err := s.Quota(ctx)
		if err != nil {
			return err
		}
		views := []jobView{}
		for _, j := range all {
			views = append(views, jobView{j, j.Spec.Priority.String(), j.Waiting(quota)})
		}
		return a.print(views, func(w io.Writer) {
			fmt.Fprintln(w, "JOB\tPLUGIN\tSTATE\tPHASE\tINPUT\tOUTPUT\tPARTS\tTOOK\tPRIORITY")
			for _, j := range all {
				jobText(w, j)
			}
			for _, v := range views {
				if v.Waits != "" {
					fmt.Fprintf(w, "%d: %s\n", v.ID, v.Waits)
				}
			}
		})
	})
}

type jobID struct {
	ID uint64 `arg:"" complete:"job" name:"job" help:"The job's number."`
}

type jobStatusCmd struct{ jobID }

// Run prints a job and its parts, without the lists of objects that only workers use.
func (c *jobStatusCmd) Run(ctx context.Context, a *app) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		j, err := s.Job(ctx, c.ID)
		if err != nil {
			return err
		}
		parts, err := s.Parts(ctx, c.ID, "")
		if err != nil {
			return err
		}
		waits, err := s.Unserved(ctx, j)
		if err != nil {
			return err
		}
		if waits == "" && j.Queued && !j.State.Ended() {
			quota, err := s.Quota(ctx)
			if err != nil {
				return err
			}
			waits = j.Waiting(quota)
		}
		view := struct {
			jobView
			Parts []*job.Part `json:"parts"`
		}{jobView{j, j.Spec.Priority.String(), waits}, parts}
		for _, p := range parts {
			p.Plan, p.Runs = nil, nil
		}
		return a.print(view, func(w io.Writer) {
			jobText(w, j)
			if j.Error != "" {
				fmt.Fprintf(w, "error: %s\n", j.Error)
			}
			if waits != "" {
				fmt.Fprintf(w, "waits: %s\n", waits)
			}
			fmt.Fprintln(w, "\nPHASE\tPART\tSTATE\tATTEMPT\tWORKER\tRECORDS\tEMITTED\tTOOK\tERROR")
			for _, p := range parts {
				fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%s\t%d\t%d\t%v\t%s\n", p.Phase, p.Index+1, p.State, p.Attempt, ranBy(p), p.Records, p.Emitted, p.Took.Round(100*time.Microsecond), firstLine(p.Error))
			}
		})
	})
}

// ranBy names the worker of a part, and that of its second attempt while that runs.
func ranBy(p *job.Part) string {
	if p.Second.Runs() {
		return p.Worker + " and " + p.Second.Worker
	}
	return p.Worker
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

type jobLogsCmd struct{ jobID }

func (c *jobLogsCmd) Run(ctx context.Context, a *app) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		if _, err := s.Job(ctx, c.ID); err != nil {
			return err
		}
		parts, err := s.Parts(ctx, c.ID, "")
		if err != nil {
			return err
		}
		type line struct {
			Phase string `json:"phase"`
			Part  int    `json:"part"`
			Line  string `json:"line"`
		}
		lines := []line{}
		for _, p := range parts {
			for _, l := range p.Log {
				lines = append(lines, line{p.Phase, p.Index + 1, l})
			}
		}
		return a.print(lines, func(w io.Writer) {
			for _, l := range lines {
				fmt.Fprintf(w, "%s %d\t%s\n", l.Phase, l.Part, l.Line)
			}
		})
	})
}

type jobCancelCmd struct {
	jobID
	Revoke bool `help:"End the sessions that workers have opened for it, too, without waiting for them: for workers that are not trusted any more."`
}

func (c *jobCancelCmd) Run(ctx context.Context, a *app) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		end := s.Cancel
		if c.Revoke {
			end = s.Revoke
		}
		if err := end(ctx, c.ID); err != nil {
			return err
		}
		return a.print(map[string]any{"job": c.ID, "state": job.Cancelled}, func(w io.Writer) { fmt.Fprintf(w, "job %d is cancelled\n", c.ID) })
	})
}

type jobForgetCmd struct {
	IDs   []uint64      `arg:"" optional:"" complete:"job" name:"job" help:"Numbers of the jobs."`
	Older time.Duration `placeholder:"DURATION" help:"All jobs that ended longer ago."`
}

// Run forgets each job, and tells which; the first that cannot be forgotten ends it.
func (c *jobForgetCmd) Run(ctx context.Context, a *app) error {
	if (len(c.IDs) > 0) == (c.Older != 0) || c.Older < 0 {
		return usagef("want numbers of jobs, or --older DURATION")
	}
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		ids := c.IDs
		if c.Older != 0 {
			all, err := s.Jobs(ctx)
			if err != nil {
				return err
			}
			for _, j := range all {
				if j.State.Ended() && time.Since(j.Ended) > c.Older {
					ids = append(ids, j.ID)
				}
			}
		}
		view := struct {
			Forgotten []uint64 `json:"forgotten"`
		}{[]uint64{}}
		var err error
		for _, id := range ids {
			if err = s.Forget(ctx, id); err != nil {
				break
			}
			view.Forgotten = append(view.Forgotten, id)
		}
		return errors.Join(a.print(view, func(w io.Writer) { fmt.Fprintf(w, "%d jobs are forgotten\n", len(view.Forgotten)) }), err)
	})
}

type jobQuotaCmd struct {
	Quota string `arg:"" optional:"" placeholder:"SIZE" help:"Bytes of records, times their replicas, for all jobs of all tenants; auto: a quarter of what the storage nodes hold, by the default replicas, at least 256MiB. Operators set it."`
}

// Run sets the quota if one is given, and prints it with the jobs of the tenant that have it or wait for it.
func (c *jobQuotaCmd) Run(ctx context.Context, a *app) error {
	if c.Quota != "" {
		var n sizeFlag
		if c.Quota != "auto" {
			if err := n.UnmarshalText([]byte(c.Quota)); err != nil || n == 0 {
				return usagef("quota %q: want a size, or auto", c.Quota)
			}
		}
		bytes := uint64(n)
		if _, err := ask(ctx, a, &quarrypb.SetDefaultsRequest{ShuffleBytes: &bytes}, quarrypbconnect.ControllerClient.SetDefaults); err != nil {
			return err
		}
	}
	res, err := ask(ctx, a, &quarrypb.ListJobQueueRequest{}, quarrypbconnect.ControllerClient.ListJobQueue)
	if err != nil {
		return err
	}
	q := client.QuotaOf(res)
	return a.print(q, func(w io.Writer) {
		fmt.Fprintf(w, "%s for records between map and reduce, %s free\n", bytesText(q.Bytes), bytesText(q.Free()))
		for _, p := range q.Jobs {
			fmt.Fprintf(w, "job %d\t%s\t%s\n", p.Job, bytesText(p.Bytes), map[bool]string{true: "has it", false: "waits"}[p.Admitted])
		}
	})
}

type jobPluginsCmd struct{}

func (jobPluginsCmd) Run(ctx context.Context, a *app) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		workers, err := s.Workers(ctx)
		if err != nil {
			return err
		}
		modules, err := s.Modules(ctx)
		if err != nil {
			return err
		}
		view := struct {
			Workers []*job.Worker `json:"workers"`
			Modules []*job.Module `json:"modules"`
		}{workers, modules}
		return a.print(view, func(w io.Writer) {
			fmt.Fprintln(w, "PLUGIN\tWHERE\tREDUCES\tSUMMARY")
			for _, m := range modules {
				fmt.Fprintf(w, "%s\tmodule of %s\t%v\t%s\n", m.About.Name, bytesText(uint64(m.Bytes)), m.About.Reduces, m.About.Summary)
			}
			for _, k := range workers {
				for _, p := range k.Plugins {
					fmt.Fprintf(w, "%s\tworker %s\t%v\t%s\n", p.Name, k.Name, p.Reduces, p.Summary)
				}
			}
			if len(workers) == 0 {
				fmt.Fprintln(w, "no worker is there: start quarry worker, or storage nodes with --workers")
			}
		})
	})
}

type jobPutCmd struct {
	Name string `arg:"" help:"Name of the plugin."`
	File string `arg:"" type:"existingfile" help:"WASM module, built with GOOS=wasip1 GOARCH=wasm go build."`
}

// Run uploads a module after it has been compiled and asked for its description, within at least a minute.
func (c *jobPutCmd) Run(ctx context.Context, a *app) error {
	if _, _, taken := coproc.Lookup(c.Name); taken {
		return usagef("plugin %s is compiled in: choose another name", c.Name)
	}
	b, err := os.ReadFile(c.File)
	if err != nil {
		return err
	}
	return a.jobs(ctx, max(a.cli.Timeout, time.Minute), func(ctx context.Context, s *job.Store) error {
		m, err := s.PutModule(ctx, c.Name, b)
		if err != nil {
			return err
		}
		return a.print(m, func(w io.Writer) { fmt.Fprintf(w, "%s: %s\n", m.About.Name, m.About.Summary) })
	})
}

type jobRemoveCmd struct {
	Name string `arg:"" help:"Name of the plugin."`
}

func (c *jobRemoveCmd) Run(ctx context.Context, a *app) error {
	return a.jobs(ctx, a.cli.Timeout, func(ctx context.Context, s *job.Store) error {
		if err := s.RemoveModule(ctx, c.Name); err != nil {
			return err
		}
		return a.print(map[string]string{"removed": c.Name}, func(w io.Writer) { fmt.Fprintf(w, "%s is gone\n", c.Name) })
	})
}
