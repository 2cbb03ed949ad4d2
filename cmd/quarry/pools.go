package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/rdma/host"
)

type poolCmd struct {
	SSH   string `name:"ssh" placeholder:"COMMAND" help:"Runs a command on another host, given the host and the command; default is that of QUARRY_SSH, or ssh with options that have it ask nothing."`
	Agent string `placeholder:"COMMAND" help:"On the other host; default: quarry pool-agent."`

	Create  poolCreateCmd  `cmd:"" help:"Make a pool of the size of a file, and copy the file into it."`
	List    poolListCmd    `cmd:"" help:"List pools."`
	Info    poolInfoCmd    `cmd:"" help:"Describe a pool."`
	Check   poolCheckCmd   `cmd:"" help:"Compare a file with a pool, and the pool's replicas with each other."`
	Sync    poolSyncCmd    `cmd:"" help:"Copy into a pool what differs from a file."`
	Restore poolRestoreCmd `cmd:"" help:"Write what a pool holds into a file."`
	Remove  poolRemoveCmd  `cmd:"" name:"rm" help:"Remove a pool with what it holds."`
	Set     poolSetCmd     `cmd:"" help:"Pools with a local part, as a poolset file names them."`
}

// Help is shown below the flags.
func (*poolCmd) Help() string {
	return `A pool is a copy of a program's memory, such as a file of persistent memory, in the cluster. The program sends it
what it has changed (package client/pool). These commands copy files; while a program has a pool open, only list, info and check work.`
}

// poolFlags name a pool and a file.
type poolFlags struct {
	poolHostFlags
	Name string `arg:"" complete:"pool" help:"Of the pool."`
	File string `arg:"" help:"As large as the pool."`
}

// withFile maps a file and runs f on its memory.
func (p poolFlags) withFile(ctx context.Context, a *app, change func(*client.Config), f func(ctx context.Context, in pools, local []byte) error) error {
	file, err := os.Open(p.File)
	if err != nil {
		return usageError{err}
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Size() == 0 {
		return usagef("%s: want a regular file that is not empty", p.File)
	}
	local, err := unix.Mmap(int(file.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", p.File, err)
	}
	defer unix.Munmap(local)
	return p.withPools(ctx, a, change, func(ctx context.Context, in pools) error { return f(ctx, in, local) })
}

// poolProgress shows how much of total bytes has been compared.
func (a *app) poolProgress(what string, total int) (progress func(done uint64), end func()) {
	bar := a.progress(what)
	return func(done uint64) { bar.set(int(done>>10), total>>10) }, bar.end
}

// poolView is a pool in JSON.
type poolView struct {
	pool.Info
	Signature string      `json:"signature"`
	Major     uint32      `json:"major"`
	Features  [3]uint32   `json:"features"` // compat, incompat, ro_compat
	UUID      string      `json:"uuid"`
	Poolset   string      `json:"poolset_uuid"`
	Report    *poolReport `json:"report,omitempty"`
}

// poolReport is what a comparison has found.
type poolReport struct {
	pool.Report
	Same bool `json:"same"`
}

func poolViewOf(i pool.Info) poolView {
	at := i.Attr
	return poolView{Info: i, Signature: string(bytes.TrimRight(at.Signature[:], "\x00")), Major: at.Major, Features: [3]uint32{at.Compat, at.Incompat, at.ROCompat},
		UUID: fmt.Sprintf("%x", at.UUID), Poolset: fmt.Sprintf("%x", at.PoolsetUUID)}
}

// printPools prints pools as lines, or v as JSON.
func (a *app) printPools(list []pool.Info, v any) error {
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "POOL\tSIZE\tREPLICAS\tSTATE\tSIGNATURE")
		for _, i := range list {
			size, state := bytesText(i.Bytes), i.State
			if i.Durable {
				size += " durable"
			}
			if i.Problem != "" {
				state = cmp.Or(i.State, "damaged") + ": " + i.Problem
			} else if i.Owner != 0 {
				state = fmt.Sprintf("open by session %d", i.Owner)
			} else if i.Dirty {
				state = "dirty"
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%q\n", i.Name, size, i.Replicas, state, bytes.TrimRight(i.Attr.Signature[:], "\x00"))
		}
	})
}

// printReport prints what a comparison has found.
func (a *app) printReport(r pool.Report, done string) error {
	return a.print(poolReport{r, r.Same()}, func(w io.Writer) {
		fmt.Fprintf(w, "%s compared, %s differed, %s not at all replicas alike%s\n", bytesText(r.Bytes), bytesText(r.Differ), bytesText(r.Unalike), done)
	})
}

// poolMakeFlags describe a new pool.
type poolMakeFlags struct {
	Replicas  int      `short:"r" placeholder:"N" help:"Replicas, each in another failure domain: 1 to 3; default is the cluster's."`
	Durable   bool     `help:"Survive a power failure of all nodes: only on nodes with persistent memory or disks."`
	Region    sizeFlag `placeholder:"SIZE" help:"Bytes of each region: whole MiB up to 2GiB. Default: 2GiB, or the size of the file if that is less."`
	Signature string   `placeholder:"TEXT" help:"Of the kind of pool, at most 8 bytes, as programs compare it."`
	Major     uint32   `name:"format" placeholder:"N" help:"Version of the pool's format, as programs compare it."`
}

func (p poolMakeFlags) options() (pool.Options, error) {
	o := pool.Options{Replicas: p.Replicas, Durable: p.Durable, RegionBytes: uint64(p.Region)}
	if o.Attr.Major = p.Major; copy(o.Attr.Signature[:], p.Signature) < len(p.Signature) {
		return o, usagef("--signature %q: at most %d bytes", p.Signature, len(o.Attr.Signature))
	}
	return o, nil
}

type poolCreateCmd struct {
	poolFlags
	poolMakeFlags
}

func (p *poolCreateCmd) Run(ctx context.Context, a *app) error {
	o, err := p.options()
	if err != nil {
		return err
	}
	return p.withFile(ctx, a, nil, func(ctx context.Context, in pools, local []byte) error {
		made, err := in.create(ctx, p.Name, local, o)
		if err != nil {
			return err
		}
		if err := a.syncPool(ctx, made, local, nil); err != nil {
			const left = "pool %s is made, and does not have all of the file: run quarry pool sync"
			return ifInterrupted(ctx, fmt.Errorf(left+": %w", p.Name, err), left, p.Name)
		}
		i, err := in.Stat(ctx, p.Name)
		if err != nil {
			return err
		}
		return a.printPools([]pool.Info{i}, poolViewOf(i))
	})
}

// syncPool copies local memory into an open pool and closes it.
func (a *app) syncPool(ctx context.Context, p openPool, local []byte, r *pool.Report) error {
	progress, end := a.poolProgress("sync", len(local))
	rep, err := p.Sync(ctx, progress)
	end()
	if r != nil {
		*r = rep
	}
	return errors.Join(err, p.Close(context.WithoutCancel(ctx)))
}

type poolListCmd struct{}

func (*poolListCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		list, err := pool.List(ctx, c)
		if err != nil {
			return err
		}
		views := make([]poolView, len(list))
		for i := range list {
			views[i] = poolViewOf(list[i])
		}
		return a.printPools(list, views)
	})
}

type poolInfoCmd struct {
	poolHostFlags
	Name string `arg:"" complete:"pool" help:"Of the pool."`
}

func (p *poolInfoCmd) Run(ctx context.Context, a *app) error {
	return p.withPoolsSoon(ctx, a, readOnly, func(ctx context.Context, in pools) error {
		i, err := in.Stat(ctx, p.Name)
		if err != nil {
			return err
		}
		return a.printPools([]pool.Info{i}, poolViewOf(i))
	})
}

type poolCheckCmd struct{ poolFlags }

func (p *poolCheckCmd) Run(ctx context.Context, a *app) error {
	return p.withFile(ctx, a, readOnly, func(ctx context.Context, in pools, local []byte) error {
		progress, end := a.poolProgress("check", len(local))
		r, err := in.Check(ctx, p.Name, local, progress)
		end()
		if err != nil {
			return err
		}
		if err := a.printReport(r, ""); err != nil || r.Same() {
			return err
		}
		return fmt.Errorf("%w: the pool, or a replica of it, is not as %s is", errFindings, p.File)
	})
}

type poolSyncCmd struct{ poolFlags }

func (p *poolSyncCmd) Run(ctx context.Context, a *app) error {
	return p.withFile(ctx, a, nil, func(ctx context.Context, in pools, local []byte) error {
		opened, err := in.open(ctx, p.Name, local)
		if err != nil {
			return err
		}
		var r pool.Report
		if err := a.syncPool(ctx, opened, local, &r); err != nil {
			return ifInterrupted(ctx, err, "pool %s has the file in part: run quarry pool sync again", p.Name)
		}
		return a.printReport(r, ": the pool is as the file is now")
	})
}

type poolRestoreCmd struct {
	poolHostFlags
	Name string `arg:"" complete:"pool" help:"Of the pool."`
	File string `arg:"" help:"To write. It takes the place of an older one when it is whole."`
}

func (p *poolRestoreCmd) Run(ctx context.Context, a *app) error {
	return p.withPools(ctx, a, nil, func(ctx context.Context, in pools) error {
		i, err := in.Stat(ctx, p.Name)
		if err != nil {
			return err
		}
		w, finish, err := end{file: p.File}.create()
		if err != nil {
			return err
		}
		var r pool.Report
		if err = finish(p.restore(ctx, a, in, w.(*os.File), i, &r)); err != nil {
			return ifInterrupted(ctx, fmt.Errorf("%s is as it was before: %w", p.File, err), "%s is as it was before", p.File)
		}
		return a.printReport(r, ": the file is as the pool is now")
	})
}

// restore fills a new file.
func (p *poolRestoreCmd) restore(ctx context.Context, a *app, in pools, f *os.File, i pool.Info, r *pool.Report) error {
	if i.State != pool.Ready {
		return fmt.Errorf("%w: pool %q: %s", pool.ErrUnfinished, p.Name, i.State)
	}
	// A full disk would end the process by SIGBUS later.
	if err := errors.Join(f.Truncate(int64(i.Bytes)), host.Reserve(f, i.Bytes, 0)); err != nil {
		return err
	}
	local, err := unix.Mmap(int(f.Fd()), 0, int(i.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(local)
	opened, err := in.open(ctx, p.Name, local)
	if err != nil {
		return err
	}
	progress, end := a.poolProgress("restore", len(local))
	*r, err = opened.Restore(ctx, progress)
	end()
	return errors.Join(err, opened.Close(context.WithoutCancel(ctx)))
}

type poolRemoveCmd struct {
	poolHostFlags
	Name string `arg:"" complete:"pool" help:"Of the pool."`
}

func (p *poolRemoveCmd) Run(ctx context.Context, a *app) error {
	return p.withPoolsSoon(ctx, a, nil, func(ctx context.Context, in pools) error {
		if err := in.Remove(ctx, p.Name); err != nil {
			return err
		}
		return a.print(map[string]any{"removed": p.Name}, func(w io.Writer) { fmt.Fprintf(w, "pool %s is removed\n", p.Name) })
	})
}
