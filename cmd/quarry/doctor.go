package main

import (
	"context"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/cmd/quarry/doctor"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/rail"
)

type doctorCmd struct {
	Host      bool     `help:"Check this host only, as before an installation: ports, limits, memory."`
	Data      string   `placeholder:"DIR" help:"Folder that a storage node here will keep regions in."`
	Capacity  sizeFlag `placeholder:"SIZE" help:"What a storage node here will host: is there room?"`
	Hugepages sizeFlag `placeholder:"SIZE" help:"Huge pages that it will use."`
	Ports     []string `placeholder:"HOST:PORT" help:"Ports that must be free; with --host the usual ones."`
}

// Help is shown by --help.
func (*doctorCmd) Help() string {
	return "Example: quarry doctor --host --capacity 64GiB, before installing a storage node. Exit code 8 when there are errors."
}

var usualPorts = []string{"127.0.0.1:7420", "127.0.0.1:7421", "127.0.0.1:7422", "127.0.0.1:9420", "127.0.0.1:9421"}

// Run prints all findings; errors among them make the exit code 8.
func (d *doctorCmd) Run(ctx context.Context, a *app) error {
	list := d.findings(ctx, a)
	err := a.print(list, func(w io.Writer) {
		for _, f := range list {
			fmt.Fprintf(w, "%s\t%s\t%s\n", f.Level, f.Check, f.What)
			if f.Remedy != "" && f.Level != doctor.OK {
				fmt.Fprintf(w, "\t\t-> %s\n", f.Remedy)
			}
		}
	})
	if err != nil {
		return err
	}
	errors, first := 0, ""
	for _, f := range list {
		if f.Level == doctor.Error {
			if errors == 0 {
				first = f.What
			}
			errors++
		}
	}
	if errors > 0 {
		return fmt.Errorf("%d %w, the first: %s", errors, errFindings, first)
	}
	return nil
}

// findings are those about this host and, without --host, about the cluster. A cluster that does not answer is a
// finding, and not an error of the command.
func (d *doctorCmd) findings(ctx context.Context, a *app) []doctor.Finding {
	h := doctor.Host{Root: "/"}
	list := h.Check(doctor.Plan{DataDir: d.Data, CapacityBytes: uint64(d.Capacity), HugepageBytes: uint64(d.Hugepages), RDMA: a.cli.RDMA})
	ports := d.Ports
	if d.Host && len(ports) == 0 {
		ports = usualPorts
	}
	list = append(list, doctor.FreePorts(ports...)...)
	if d.Host {
		return list
	}
	c := doctor.Cluster{Controllers: a.cli.Controller, TLS: a.tls, Version: version}
	c.Rails, _ = rail.ParseOwn(a.cli.Rail) // prepare has refused others
	if a.trust != nil {
		c.NodeTLS = a.trust.Client(identity.Node)
	}
	c.Status, c.Err = ask(ctx, a, &quarrypb.StatusRequest{}, quarrypbconnect.ControllerClient.Status)
	return append(list, c.Check(ctx)...)
}
