package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

type poolSetCmd struct {
	Create  poolSetCreateCmd  `cmd:"" help:"Make the files and the pools of a set, all zero."`
	Info    poolSetInfoCmd    `cmd:"" help:"Describe the files and the pools of a set."`
	Check   poolSetCheckCmd   `cmd:"" help:"Compare the local part of a set with its mirrors and pools."`
	Sync    poolSetSyncCmd    `cmd:"" help:"Copy into mirrors and pools what differs from the local part; make those that are missing."`
	Restore poolSetRestoreCmd `cmd:"" help:"Make the local part again, which is missing, from a mirror or a pool."`
	Remove  poolSetRemoveCmd  `cmd:"" name:"rm" help:"Remove the pools and the files of a set."`
}

// Help is shown below the flags.
func (*poolSetCmd) Help() string {
	return `A poolset file names the file that is a program's memory, mapped by the program, and what the program's changes are
replicated to:

    PMEMPOOLSET
    1GiB /mnt/pmem0/ledger
    REPLICA
    1GiB /mnt/pmem1/ledger
    REPLICA quarry: ledger
    REPLICA ops@far.example.com ledger

This is the syntax of poolset(5). The first file is the local part, the second one a mirror, and quarry: stands for the cluster,
in which the pool ledger is. The last line names a pool of another cluster, which that host reaches: quarry pool-agent runs there, by ssh. The program opens the set with package client/pool; info and check work meanwhile.`
}

// poolSetFlags name a poolset file.
type poolSetFlags struct {
	File string `arg:"" help:"Poolset file."`
}

// set reads the file.
func (p poolSetFlags) set(a *app) (*pool.Set, error) {
	s, err := pool.ReadSet(p.File)
	if err == nil {
		s.SSH, s.Agent = a.cli.Pool.SSH, a.cli.Pool.Agent
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil, usageError{err}
	}
	return s, err
}

// withSet runs f with a client, or with none if the set has no pool in the client's cluster.
func (a *app) withSet(ctx context.Context, s *pool.Set, change func(*client.Config), f func(context.Context, *client.Client) error) error {
	if len(s.Pools) == 0 {
		return f(ctx, nil)
	}
	return a.withLong(ctx, change, f)
}

// setReport prints what a comparison has found.
func (a *app) setReport(r pool.Report, done string) error {
	return a.print(poolReport{r, r.Same()}, func(w io.Writer) {
		fmt.Fprintf(w, "%s compared in all replicas, %s differed, %s not at all nodes alike%s\n", bytesText(r.Bytes), bytesText(r.Differ), bytesText(r.Unalike), done)
	})
}

type poolSetCreateCmd struct {
	poolSetFlags
	poolMakeFlags
}

func (p *poolSetCreateCmd) Run(ctx context.Context, a *app) error {
	o, err := p.options()
	if err != nil {
		return err
	}
	s, err := p.set(a)
	if err != nil {
		return err
	}
	return a.withSet(ctx, s, nil, func(ctx context.Context, c *client.Client) error {
		m, err := s.Create(ctx, c, o, pool.MemoryOptions{})
		if errors.Is(err, os.ErrExist) {
			return usageError{fmt.Errorf("%w: the files of a new set are not there before", err)}
		}
		if err != nil {
			return err
		}
		if err := m.Close(context.WithoutCancel(ctx)); err != nil {
			return err
		}
		return a.printSet(ctx, c, s)
	})
}

// poolSetView is a set in JSON.
type poolSetView struct {
	Parts []pool.PartInfo `json:"parts"` // the program's memory, and mirrors
	Pools []poolView      `json:"pools"`
}

func (a *app) printSet(ctx context.Context, c *client.Client, s *pool.Set) error {
	v := poolSetView{Parts: s.Info()}
	names := slices.Clone(s.Pools)
	for _, r := range s.Remotes {
		names = append(names, r.String())
	}
	for k, name := range names {
		var i pool.Info
		var err error
		if r := k - len(s.Pools); r >= 0 {
			i, err = s.Host(s.Remotes[r].Host).Stat(ctx, s.Remotes[r].Name)
		} else {
			i, err = pool.Stat(ctx, c, name)
		}
		if i.Name = name; errors.Is(err, client.ErrNoName) && i.State == "" {
			i.State = pool.Missing
		} else if err != nil {
			if i.State == "" && !errors.Is(err, pool.ErrNotPool) && !errors.Is(err, pool.ErrAgent) {
				return err
			}
			if i.Problem = err.Error(); errors.Is(err, pool.ErrAgent) {
				i.State = "unreachable"
			}
		}
		v.Pools = append(v.Pools, poolViewOf(i))
	}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "REPLICA\tSIZE\tSTATE")
		for _, p := range v.Parts {
			fmt.Fprintf(w, "%s\t%s\t%s\n", p.Path, sizeOf(p.Bytes, p.Durable), tornState(stateOf(p.State, p.Dirty, p.Problem), p.Torn))
		}
		for k, p := range v.Pools {
			in := pool.Cluster + " "
			if k >= len(s.Pools) {
				in = "" // its name has the host
			}
			fmt.Fprintf(w, "%s%s\t%s\t%s\n", in, p.Name, sizeOf(p.Bytes, p.Durable), tornState(stateOf(p.State, p.Dirty, p.Problem), p.Torn))
		}
	})
}

func sizeOf(n uint64, durable bool) string {
	if durable {
		return bytesText(n) + " durable"
	}
	return bytesText(n)
}

// tornState adds to a state that the replica is torn.
func tornState(state string, torn bool) string {
	if torn {
		state += ", torn: a sync has not returned, or a persist has failed"
	}
	return state
}

func stateOf(state string, dirty bool, problem string) string {
	if dirty && state == pool.Ready {
		state = "open, or not closed"
	}
	if problem != "" {
		state += ": " + problem
	}
	return state
}

type poolSetInfoCmd struct{ poolSetFlags }

func (p *poolSetInfoCmd) Run(ctx context.Context, a *app) error {
	s, err := p.set(a)
	if err != nil {
		return err
	}
	return a.withSet(ctx, s, readOnly, func(ctx context.Context, c *client.Client) error { return a.printSet(ctx, c, s) })
}

// withProgress reads the set and runs f.
func (p poolSetFlags) withProgress(ctx context.Context, a *app, what string, change func(*client.Config), f func(ctx context.Context, c *client.Client, s *pool.Set, progress func(uint64)) error) error {
	s, err := p.set(a)
	if err != nil {
		return err
	}
	return a.withSet(ctx, s, change, func(ctx context.Context, c *client.Client) error {
		progress, end := a.poolProgress(what, int(s.Part.Bytes-pool.HeaderBytes))
		defer end()
		return f(ctx, c, s, progress)
	})
}

type poolSetCheckCmd struct{ poolSetFlags }

func (p *poolSetCheckCmd) Run(ctx context.Context, a *app) error {
	return p.withProgress(ctx, a, "check", readOnly, func(ctx context.Context, c *client.Client, s *pool.Set, progress func(uint64)) error {
		r, err := s.Check(ctx, c, progress)
		if err != nil {
			return err
		}
		if err := a.setReport(r, ""); err != nil || r.Same() {
			return err
		}
		return fmt.Errorf("%w: a mirror or a pool is not as %s is", errFindings, s.Part.Path)
	})
}

type poolSetSyncCmd struct {
	poolSetFlags
	poolMakeFlags
}

// Help is shown below the flags.
func (*poolSetSyncCmd) Help() string {
	return `The local part is kept, also where another program has changed a pool since; to keep the pool, move the local part away and use restore.
The flags describe pools that are missing, and are made again.`
}

func (p *poolSetSyncCmd) Run(ctx context.Context, a *app) error {
	o, err := p.options()
	if err != nil {
		return err
	}
	return p.withProgress(ctx, a, "sync", nil, func(ctx context.Context, c *client.Client, s *pool.Set, progress func(uint64)) error {
		r, err := s.Sync(ctx, c, o, progress)
		if err != nil {
			return ifInterrupted(ctx, err, "the replicas have the local part in part: run quarry pool set sync again")
		}
		return a.setReport(r, ": the replicas are as the local part is now")
	})
}

type poolSetRestoreCmd struct {
	poolSetFlags
	From string `placeholder:"REPLICA" help:"Path of a mirror, name of a pool, or 'USER@HOST POOL'. Default: the first that is there and is not torn; all have to have the same last owner then."`
}

func (p *poolSetRestoreCmd) Run(ctx context.Context, a *app) error {
	return p.withProgress(ctx, a, "restore", nil, func(ctx context.Context, c *client.Client, s *pool.Set, progress func(uint64)) error {
		r, err := s.Restore(ctx, c, p.From, progress)
		if errors.Is(err, os.ErrExist) {
			return usageError{err}
		}
		if err != nil {
			return ifInterrupted(ctx, err, "there is no local part, as before")
		}
		return a.setReport(r, ": "+s.Part.Path+" is as the replica is now")
	})
}

type poolSetRemoveCmd struct{ poolSetFlags }

func (p *poolSetRemoveCmd) Run(ctx context.Context, a *app) error {
	s, err := p.set(a)
	if err != nil {
		return err
	}
	return a.withSet(ctx, s, nil, func(ctx context.Context, c *client.Client) error {
		if err := s.Remove(ctx, c); err != nil {
			return err
		}
		return a.print(map[string]any{"removed": p.File}, func(w io.Writer) { fmt.Fprintf(w, "the pools and files of %s are removed\n", p.File) })
	})
}
