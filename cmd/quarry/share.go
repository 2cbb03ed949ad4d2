package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// shareCmd is quarry share: the agent of a host that maps another host's device.
type shareCmd struct {
	Device string        `arg:"" help:"The device DAX, such as /dev/dax0.0."`
	Host   string        `placeholder:"NAME" help:"Name of this host, which no other host of the device has; default what the kernel says."`
	Socket string        `placeholder:"PATH" help:"Socket at which clients of this host find the agent. Default in the folder for temporary files."`
	Wait   time.Duration `name:"wait-for-node" default:"1m" help:"How long to wait for the storage node that owns the device, and for clients of an earlier agent."`
}

// Help is shown below the flags.
func (*shareCmd) Help() string {
	return `On the host of the storage node:

  quarry storage --fabric tcp --data /dev/dax0.0 --shared --format

and on each other host that maps the same memory:

  quarry share /dev/dax0.0

The two first test whether their processors see one coherent memory, and the node lets the host in if they
do. Clients of the host then execute their verbs on the memory themselves. It needs no network and no
controller; run it as the user that owns the device. Clients of other users, and those of hosts without it,
use tcp.

While it does not run, the node cannot fence sessions that came by this host: start it again, or, if the host is
off for good, restart the storage node with --host-gone.`
}

// Run serves until the context ends.
func (s *shareCmd) Run(ctx context.Context, a *app) error {
	host := s.Host
	if host == "" {
		var err error
		if host, err = os.Hostname(); err != nil {
			return err
		}
	}
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("the id of this host: %w", err)
	}
	socket, err := filepath.Abs(cmp.Or(s.Socket, filepath.Join(userdir.Path(), "quarry-share-"+filepath.Base(s.Device)+".sock")))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return err
	}
	joining, cancel := context.WithTimeout(ctx, s.Wait)
	defer cancel()
	dev, err := lockDevice(joining, s.Device)
	if err != nil {
		return err
	}
	machine, _ := os.ReadFile("/etc/machine-id") // machine-id(5); without it no restarted host is taken for the one that it was
	agent, err := cxl.NewAgent(joining, dev, cxl.AgentConfig{Host: host, BootID: strings.TrimSpace(string(id)), MachineID: strings.TrimSpace(string(machine)), Socket: socket, Log: a.log})
	if err != nil {
		return errors.Join(err, dev.File.Close())
	}
	if err := a.ready(map[string]string{"ready": "share", "device": s.Device, "host": host, "shm": socket}, func(w io.Writer) {
		fmt.Fprintf(w, "host %s shares %s: shm %s\n", host, s.Device, socket)
	}); err != nil {
		return err
	}
	return agent.Serve(ctx)
}

// lockDevice waits until clients of an earlier agent have given the device up.
func lockDevice(ctx context.Context, path string) (*pmem.Device, error) {
	for {
		dev, err := pmem.OpenDevice(path)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return dev, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w; or a client of an earlier quarry share has it still: end it", err)
		}
	}
}
