package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/prom"
	"github.com/quarrystore/quarry/client/vmm/pager"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/internal/pagerlink"
)

type pagerCmd struct {
	metricsFlags
	Memory       sizeFlag      `default:"256MiB" help:"Pages kept in memory, of all spaces together; at least 1MiB."`
	ReadAhead    sizeFlag      `default:"2MiB" help:"Most bytes that one fault reads where accesses go up in sequence: 4KiB to 2MiB."`
	FaultTimeout time.Duration `default:"30s" help:"Longest wait of a program for a page; then the access ends with SIGBUS."`
	Socket       string        `placeholder:"PATH" help:"Socket for programs of this user; default is where they look for it."`
	Idle         time.Duration `placeholder:"TIME" help:"End when nothing has been mapped for so long; default: never."`
	ReadOnly     bool          `help:"Map spaces for loads alone."`
}

// Run serves programs until the context ends.
func (p *pagerCmd) Run(ctx context.Context, a *app) error {
	if p.Memory < pager.MinMemory {
		return usagef("--memory %d: want %s or more", uint64(p.Memory), bytesText(pager.MinMemory))
	}
	if p.ReadAhead < 4096 || p.ReadAhead > pager.MaxReadAhead {
		return usagef("--read-ahead %d: want 4KiB to %s", uint64(p.ReadAhead), bytesText(pager.MaxReadAhead))
	}
	if p.FaultTimeout <= 0 || p.Idle < 0 {
		return usagef("--fault-timeout %v, --idle %v: want times above 0", p.FaultTimeout, p.Idle)
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	socket := p.Socket
	if socket == "" {
		socket = pagerlink.DefaultSocket()
	}
	port, err := p.metricsFlags.open(ctx, a, "pager")
	if err != nil {
		return err
	}
	defer port.close()
	c, err := a.connect(ctx, func(c *client.Config) {
		c.ReadOnly, c.Timeout = p.ReadOnly, p.FaultTimeout
	})
	if err != nil {
		return err
	}
	// Not before the pager can serve: programs that find the socket wait for nothing else.
	l, err := pagerlink.Listen(ctx, socket)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	defer l.Close()
	s, err := pager.New(pager.Config{Client: c, Memory: uint64(p.Memory), ReadAhead: uint64(p.ReadAhead), FaultTimeout: p.FaultTimeout, Idle: p.Idle,
		Guard: []string{exe, "pager-guard"}, Logger: a.log})
	if err != nil {
		return errors.Join(err, c.Close())
	}
	port.watch(prom.NewCollector(c), collect.NewPager(s))
	err = a.ready(port.tell(map[string]string{"ready": "pager", "socket": socket}), func(w io.Writer) {
		port.text(w)
		fmt.Fprintf(w, "Programs map spaces by way of %s.\n", socket)
	})
	if err == nil {
		err = s.Serve(ctx, l)
	}
	return errors.Join(err, c.Close())
}

// pagerGuardCmd is a process that a pager starts.
type pagerGuardCmd struct{}

func (*pagerGuardCmd) Run() error { return pager.RunGuard() }
