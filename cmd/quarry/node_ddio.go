package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/ddio"
)

type nodeDDIOCmd struct {
	Name    string `arg:"" optional:"" complete:"node" help:"Name of a node; default all of them."`
	On      bool   `xor:"switch" help:"Have the adapter of this host write into the processors' caches. As root."`
	Off     bool   `xor:"switch" help:"Have it write past them, to memory."`
	Adapter string `placeholder:"DEVICE" help:"Read, or with --on and --off switch, this RDMA device of this host, such as mlx5_0: no controller is asked."`
	Root    string `hidden:"" default:"/" help:"Root of the file system in which the device is looked for."`
}

// Help is shown by --help.
func (*nodeDDIOCmd) Help() string {
	return `Without --adapter, --on or --off it shows what each node has seen when it started, and how its clients flush.

The switch is in the root port that an adapter is behind, and holds for every device there: only root of that host changes it, and
no controller does. On the host, --off or --on switches it until it is set again or the host restarts; it is refused while a node there relies
on it as it is, and for parts whose switch is not known. A node reads it when it starts. quarry storage --ddio switches it for as long as the node runs.

Examples:
    quarry node ddio
    quarry node ddio n2 --json
    sudo quarry node ddio --adapter mlx5_0 --off`
}

// ddioLine is what a node says of its adapter's root port.
type ddioLine struct {
	Node   string `json:"node"`
	State  string `json:"state"`
	DDIO   string `json:"ddio"`
	Method string `json:"flush_method"`
}

// adapterLine is what this host says of a root port.
type adapterLine struct {
	Adapter string `json:"adapter"`
	Port    string `json:"root_port"`
	DDIO    string `json:"ddio"`
}

// Run lists what the nodes say of their adapters or, with a switch or an adapter named, reads and
// changes the root port on this host.
func (c *nodeDDIOCmd) Run(ctx context.Context, a *app) error {
	if c.Adapter == "" && !c.On && !c.Off {
		return c.list(ctx, a)
	}
	if c.Name != "" {
		return usagef("the switch of a node's adapter is read and changed on the node's host: run quarry node ddio --adapter DEVICE there, without the node's name")
	}
	if c.Adapter == "" {
		found, err := filepath.Glob(filepath.Join(c.Root, "sys/class/infiniband/*"))
		if err != nil || len(found) != 1 {
			return usagef("this host has %d RDMA devices: name one with --adapter", len(found))
		}
		c.Adapter = filepath.Base(found[0])
	}
	if strings.ContainsRune(c.Adapter, os.PathSeparator) {
		return usagef("--adapter %s: want the name of an RDMA device, such as mlx5_0", c.Adapter)
	}
	port, err := ddio.Find(c.Root, c.Adapter)
	if err != nil {
		return err
	}
	if c.On || c.Off {
		want := host.DDIOOff
		if c.On {
			want = host.DDIOOn
		}
		if err := port.Switch(want); err != nil {
			return err
		}
	}
	now, err := port.Read()
	if err != nil {
		return err
	}
	v := adapterLine{Adapter: port.Adapter, Port: port.Address, DDIO: now.String()}
	return a.print(v, func(w io.Writer) {
		fmt.Fprintf(w, "adapter %s is behind root port %s, whose DDIO is %s\n", v.Adapter, v.Port, v.DDIO)
	})
}

// list shows what the nodes have told the controller.
func (c *nodeDDIOCmd) list(ctx context.Context, a *app) error {
	v, err := a.status(ctx)
	if err != nil {
		return err
	}
	list := []ddioLine{}
	for _, n := range v.Nodes {
		if c.Name == "" || c.Name == n.Name {
			list = append(list, ddioLine{Node: n.Name, State: n.State, DDIO: n.DDIO, Method: n.FlushMethod})
		}
	}
	if c.Name != "" && len(list) == 0 {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("no node %s: quarry node list names them", c.Name))
	}
	return a.print(list, func(w io.Writer) {
		fmt.Fprintln(w, "NODE\tSTATE\tDDIO\tFLUSH")
		for _, n := range list {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", n.Node, n.State, cmp.Or(n.DDIO, "-"), cmp.Or(n.Method, "-"))
		}
	})
}
