package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/rail"
	"github.com/quarrystore/quarry/storagenode"
)

const defaultListen = "127.0.0.1:7420"

// ready prints that a service runs: one line of JSON, or text.
func (a *app) ready(v map[string]string, text func(io.Writer)) error {
	if a.cli.JSON {
		return json.NewEncoder(a.out).Encode(v)
	}
	return a.print(nil, text)
}

// inUse turns the error for a port that another process uses into one line that names it.
func inUse(err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: another program has this port; choose another with --listen", err)
	}
	return err
}

// etcdLog is the logger of the embedded etcd: none above level info. etcd warns at every start,
// and logs its own shutdown as an error; its failures reach the caller as errors.
func (a *app) etcdLog() *slog.Logger {
	if a.log.Enabled(context.Background(), slog.LevelInfo) {
		return a.log
	}
	return slog.New(slog.DiscardHandler)
}

// serving is the TLS configuration of a service: server for its ports, client for its calls of
// processes with the role. Both are nil without --tls-cert.
func (a *app) serving(calls identity.Role) (server, client *tls.Config) {
	if a.trust == nil {
		return nil, nil
	}
	if a.trust.Serves() {
		server = a.trust.Server()
	}
	return server, a.trust.Client(calls)
}

// own is the identity of a service of a role, none if its certificate names none or callers
// cannot show theirs.
func (a *app) own(role identity.Role) (identity.ID, error) {
	if a.trust == nil || !a.trust.Mutual() {
		return identity.ID{}, nil
	}
	if id := a.trust.ID(); id.Role != role {
		return id, usagef("certificate %s: it is of %s, want one of role %s: quarry cert %s NAME", a.cli.TLSCert, id, role, role)
	}
	return a.trust.ID(), nil
}

// waitFor returns nil when the context ends, or the first error of a service.
func waitFor(ctx context.Context, failed ...<-chan error) error {
	first := make(chan error, len(failed))
	for _, f := range failed {
		if f != nil {
			go func() {
				select {
				case err := <-f:
					first <- err
				case <-ctx.Done():
				}
			}()
		}
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-first:
		return err
	}
}

// storageCmd is quarry storage: a storage node, with workers if --workers asks for them.
type storageCmd struct {
	metricsFlags
	workerFlags
	Name           string   `placeholder:"NAME" help:"Name in the cluster, unique; default the host's name."`
	Domain         string   `placeholder:"/DC/RACK/HOST" help:"Failure domain; replicas lie in different ones. Default /default/default/NAME."`
	Data           string   `placeholder:"DIR" help:"Keep regions as files there, or on a device DAX such as /dev/dax0.0; without, in memory only."`
	Format         bool     `help:"Make a directory on a device given by --data that has none, and give up what it held. One that has a directory is used as it is."`
	Shared         bool     `help:"Other hosts map the device given by --data too, such as memory behind a CXL switch, and run quarry share: their clients use the regions as those of this host do. With --fabric tcp."`
	Host           string   `placeholder:"NAME" help:"With --shared: name of this host, which no other host of the device has; default what the kernel says."`
	HostGone       []string `name:"host-gone" placeholder:"HOST" help:"With --shared: this host is off for good. The node does not wait for its agent. While a process there still runs it can damage regions."`
	Medium         string   `enum:"auto,persistent,volatile" default:"auto" help:"Of a device given by --data: volatile memory is not flushed, and its regions count as lost with power; persistent memory survives also where the kernel lists no NVDIMM behind the device; auto goes by what the kernel lists."`
	Flush          string   `enum:"auto,native,appliance,agent" default:"auto" help:"How RDMA clients make persistent memory durable: by the adapter's FLUSH (native), a READ behind the WRITEs (appliance), or the node's processors (agent); auto takes what is seen to hold."`
	DDIO           string   `name:"ddio" enum:"on,off,keep" default:"keep" help:"While the node runs, have its adapter write into the processors' caches (on) or past them (off): Intel's DDIO, for all devices behind the adapter's root port. As root, on known parts."`
	NUMA           string   `name:"numa" placeholder:"auto|N" help:"Use the processors and the memory of one NUMA node: a number, or that of the adapter (auto). Default: all."`
	Capacity       sizeFlag `default:"64GiB" help:"Most bytes of all regions together. A region takes all of its memory, or disk, when it is made."`
	Hugepages      sizeFlag `placeholder:"SIZE" help:"Keep regions on huge pages of this size, 2MiB or 1GiB, set aside when a region is made; not with --data."`
	Listen         []string `default:"127.0.0.1:7421" placeholder:"[RAIL=]HOST:PORT" help:"Port of the tcp fabric. Several, comma separated: the node is at several networks, which RAIL names, and each HOST is one of its addresses."`
	Advertise      string   `placeholder:"HOST" help:"Name or address, without port, that others reach this node by; needed where it listens on all addresses. Of a node with several --listen it is that of the other ports."`
	Agent          string   `default:"127.0.0.1:7422" placeholder:"HOST:PORT" help:"Port that controllers call."`
	Gossip         string   `name:"gossip-listen" placeholder:"HOST:PORT" help:"UDP port of the pulse, the cluster's failure detector; none turns it off. Default a free port beside --listen, or beside --agent if that has several addresses."`
	Verbs          string   `name:"rdma-listen" placeholder:"HOST:PORT" help:"Port at which verbs clients exchange queue pairs; default a free one."`
	MaxSessions    int      `placeholder:"N" help:"Most client sessions that are connected at once; default 4096. Others are refused, and use other nodes."`
	MaxConnections int      `placeholder:"N" help:"Most connections of clients at once, one for each lane; default 16384."`
	Socket         string   `placeholder:"PATH" help:"Socket of the shm fabric; none serves no shm. Default in the folder for temporary files."`

	StopTimeout time.Duration `name:"stop-timeout" default:"20s" help:"On SIGTERM, wait up to this long while other nodes get replicas of the regions that need this one. 0 stops at once; a second signal does too."`
}

// Run serves until the context ends or the node fails. Then the workers end, because they map the
// node's memory; the node waits for other replicas of its regions (--stop-timeout), and closes.
func (s *storageCmd) Run(ctx context.Context, a *app) error {
	own, err := a.own(identity.Node)
	if err != nil {
		return err
	}
	if name := cmp.Or(s.Name, own.Name); own.Name != "" && name != own.Name {
		return usagef("--name %s: the certificate is of node %s", s.Name, own.Name)
	}
	listen := strings.Join(s.Listen, ",")
	ports, err := rail.ParseListen(listen)
	if err != nil {
		return usagef("--listen %w", err)
	}
	exposed := []string{s.Agent}
	for _, p := range ports {
		exposed = append(exposed, p.Address)
	}
	if _, err := a.guardCluster(exposed...); err != nil {
		return err
	}
	cert, calls := a.serving(identity.Controller)
	port, err := s.metricsFlags.open(ctx, a, "storage")
	if err != nil {
		return err
	}
	defer port.close()
	storagenode.Version = version
	n, err := storagenode.Start(ctx, storagenode.Config{Controllers: a.cli.Controller, Name: cmp.Or(s.Name, own.Name), ID: own, FailureDomain: s.Domain, Dir: s.Data, Format: s.Format, Shared: s.Shared, Host: s.Host, HostsGone: s.HostGone, Medium: s.Medium, Flush: s.Flush, DDIO: s.DDIO, NUMA: s.NUMA,
		HugepageBytes: uint64(s.Hugepages), CapacityBytes: uint64(s.Capacity), Advertise: s.Advertise, Listen: listen, StrictRails: a.cli.Rails == client.RailsStrict, AgentListen: s.Agent, GossipListen: s.Gossip, Socket: s.Socket, MaxSessions: s.MaxSessions, MaxConnections: s.MaxConnections, RDMA: a.rdma(s.Verbs), Token: a.cli.Token, TLS: cert, ControllerTLS: calls, FabricTLS: a.fabric, Logger: a.log})
	if err != nil {
		return inUse(err)
	}
	port.watch(collect.NewNodes(n))
	st := n.Stats()
	work, endWorkers := context.WithCancel(ctx)
	defer endWorkers()
	wait, err := s.workerFlags.start(work, a, st.Name, a.cli.Controller)
	if err != nil {
		return errors.Join(err, n.Close())
	}
	err = a.ready(port.tell(map[string]string{"ready": "storage", "name": st.Name, "tcp": st.TCP, "rails": railsText(st), "shm": st.Socket, "verbs": st.Verbs, "agent": st.Agent}), func(w io.Writer) {
		fmt.Fprintf(w, "storage node %s ready: tcp %s, shm %s, verbs %s, agent %s\n", st.Name, railsText(st), cmp.Or(st.Socket, "none"), cmp.Or(st.Verbs, "none"), st.Agent)
		port.text(w)
	})
	if err == nil {
		err = waitFor(ctx, n.Err(), port.failed())
	}
	endWorkers() // they use the node's memory
	wait()
	if err == nil && s.StopTimeout > 0 {
		leave, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), s.StopTimeout, fmt.Errorf("--stop-timeout %v has passed", s.StopTimeout))
		defer cancel()
		if err := n.Leave(leave); err != nil {
			a.log.Warn("storage node: stops although it is needed", "error", err)
		}
	}
	return errors.Join(err, n.Close())
}

// railsText is the node's tcp addresses as --listen takes them.
func railsText(st storagenode.Stats) string {
	var all []string
	for _, r := range st.Rails {
		if r.Rail != "" {
			r.Address = r.Rail + "=" + r.Address
		}
		all = append(all, r.Address)
	}
	return strings.Join(all, ",")
}

// devCmd is quarry dev: a controller with its etcd and storage nodes in one process.
type devCmd struct {
	metricsFlags
	workerFlags
	Nodes       int           `default:"3" help:"Storage nodes."`
	Listen      string        `default:"127.0.0.1:7420" placeholder:"HOST:PORT" help:"Port of the controller; port 0 takes a free one."`
	Data        string        `placeholder:"DIR" help:"Folder for state and regions; without it, nothing survives the command."`
	Replicas    uint32        `placeholder:"N" help:"The cluster's default number of replicas from now on. Without it: 2 where there are two nodes."`
	RegionBytes sizeFlag      `default:"2GiB" help:"Largest size of regions; the first have 64 MiB, later ones double what there is."`
	Lease       time.Duration `default:"3s" help:"Lease of sessions."`
}

const maxDevNodes = 16

// devProbe is long, because the nodes are in this process: a late answer means that the process is
// short of processor time, and not that the node is lost.
const devProbe = 5 * time.Second

func (d *devCmd) check() error {
	if d.Nodes < 1 || d.Nodes > maxDevNodes {
		return usagef("--nodes %d: want 1 to %d", d.Nodes, maxDevNodes)
	}
	if int(d.Replicas) > d.Nodes {
		return usagef("--replicas %d: there are only %d nodes, each a failure domain", d.Replicas, d.Nodes)
	}
	return nil
}

// Run starts the controller, then the nodes, then a first region, and serves until the context ends
// or one of them fails.
func (d *devCmd) Run(ctx context.Context, a *app) (err error) {
	if err := d.check(); err != nil {
		return err
	}
	exposed, err := a.guard(a.cli.Token != "", "--token", d.Listen)
	if err != nil {
		return err
	}
	// Other users of the host reach loopback, too.
	private := a.cli.Token == "" && !a.cli.Insecure
	if private {
		a.cli.Token = rand.Text()
	}
	port, err := d.metricsFlags.open(ctx, a, "dev")
	if err != nil {
		return err
	}
	defer port.close()
	f := etcdFlags{}
	if d.Data != "" {
		f.Data = filepath.Join(d.Data, "controller")
	}
	etcd, _, failed, stop, err := f.store(ctx, a, "", false)
	if err != nil {
		return err
	}
	defer stop()
	controller.Version, storagenode.Version = version, version
	pages := a.console()
	cfg := controller.Config{Pages: pages, Etcd: etcd, Insecure: exposed, Alone: true, Embedded: true, ProbeTimeout: devProbe, Listen: d.Listen, Name: "dev", Lease: d.Lease, RegionBytes: uint64(d.RegionBytes), Token: a.cli.Token, Logger: a.log}
	authority, err := d.encrypt(a, &cfg)
	if err != nil {
		return err
	}
	ctl, err := controller.Start(ctx, cfg)
	if err != nil {
		return inUse(err)
	}
	defer func() { err = errors.Join(err, ctl.Close()) }()
	page, file := ctl.URL(), ""
	if authority != nil {
		address, token := strings.TrimPrefix(page, "http://"), ""
		if private {
			token, page = a.cli.Token, "http://quarry:"+a.cli.Token+"@"+address
		}
		kept, err := userdir.Keep(address, token, authority)
		if err != nil {
			return fmt.Errorf("the authority and the token of this cluster cannot be kept for your other commands: %w; or give --insecure to go without", err)
		}
		defer kept.Close()
		file = kept.TokenFile
	}
	look, blind := context.WithCancel(ctx)
	defer blind()
	go pages.Run(look, ctl.URL())
	wctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := ctl.WaitLeader(wctx); err != nil {
		return err
	}
	var nodes devNodes
	defer nodes.close()
	if err := d.fill(ctx, a, &nodes, ctl.URL()); err != nil {
		return err
	}
	port.watch(collect.NewController(ctl), collect.NewNodes(nodes.list...))
	err = a.ready(port.tell(map[string]string{"ready": "dev", "url": ctl.URL(), "nodes": fmt.Sprint(d.Nodes), "token_file": file}), func(w io.Writer) {
		d.welcome(w, ctl.URL(), page)
		port.text(w)
	})
	if err != nil {
		return err
	}
	return waitFor(ctx, append(nodes.failed, failed, ctl.Err(), port.failed())...)
}

// fill starts the nodes, sets the default of replicas, and makes the first region.
func (d *devCmd) fill(ctx context.Context, a *app, nodes *devNodes, controller string) error {
	for i := range d.Nodes {
		if err := nodes.start(ctx, a, d, fmt.Sprintf("n%d", i+1), controller); err != nil {
			return err
		}
	}
	if d.Replicas != 0 {
		a.cli.Controller = []string{controller}
		if _, err := ask(ctx, a, &quarrypb.SetDefaultsRequest{Replicas: &d.Replicas}, quarrypbconnect.ControllerClient.SetDefaults); err != nil {
			return err
		}
	}
	return d.firstRegion(ctx, a, controller)
}

const devCertEndsAfter = 10 * 365 * 24 * time.Hour

// encrypt gives the controller a certificate, and returns the certificate of its authority, PEM: the user's other
// processes find it in a file (userdir.Keep) and call over TLS. The keys are in memory alone. The port serves plain HTTP,
// too: browsers and curl do not know the authority. nil: --insecure, or other hosts reach the port.
func (d *devCmd) encrypt(a *app, cfg *controller.Config) ([]byte, error) {
	if a.cli.Insecure || !onLoopback(d.Listen) {
		return nil, nil
	}
	authority, ca, _, err := identity.NewAuthority("dev", devCertEndsAfter)
	if err != nil {
		return nil, err
	}
	cfg.MixedTLS = true
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	if host, _, err := net.SplitHostPort(d.Listen); err == nil && !slices.Contains(hosts, host) {
		hosts = append(hosts, host) // another address of the loopback network
	}
	cfg.TLS, err = authority.Serve(identity.Controller, "dev", hosts, devCertEndsAfter)
	return ca, err
}

// devNodes are the storage nodes of quarry dev, each a failure domain, with their workers.
type devNodes struct {
	list   []*storagenode.Node
	failed []<-chan error
	ends   []func() // end the workers of a node, and wait for them
}

// start starts one node and its workers. What has been started is in ns even with an error; close
// ends it.
func (ns *devNodes) start(ctx context.Context, a *app, d *devCmd, name, controller string) error {
	cfg := storagenode.Config{Controllers: []string{controller}, Name: name, FailureDomain: "/dev/" + name + "/" + name, Token: a.cli.Token, Logger: a.log}
	if d.Data != "" {
		cfg.Dir = filepath.Join(d.Data, name)
	}
	n, err := storagenode.Start(ctx, cfg)
	if err != nil {
		return err
	}
	ns.list, ns.failed = append(ns.list, n), append(ns.failed, n.Err())
	work, end := context.WithCancel(ctx)
	wait, err := d.workerFlags.start(work, a, name, []string{controller})
	if err != nil {
		end()
		return err
	}
	ns.ends = append(ns.ends, func() { end(); wait() })
	return nil
}

// close ends the workers, which use the nodes' memory, and then the nodes, the last one first.
func (ns *devNodes) close() {
	for _, end := range ns.ends {
		end()
	}
	for _, n := range slices.Backward(ns.list) {
		n.Close()
	}
}

// firstRegion makes a region where there is none, so that the first allocation need not wait for
// one.
func (d *devCmd) firstRegion(ctx context.Context, a *app, url string) error {
	a.cli.Controller = []string{url}
	s, err := a.status(ctx)
	if err != nil || len(s.Regions) > 0 {
		return err
	}
	for {
		_, err = a.createRegion(ctx, 0)
		if connect.CodeOf(err) != connect.CodeAborted { // it says that it is to be tried again
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// welcome prints what to do next.
func (d *devCmd) welcome(w io.Writer, url, page string) {
	at := ""
	if url != "http://"+defaultListen {
		at = " -C " + url
	}
	kept := "in memory: everything is gone when this ends"
	if d.Data != "" {
		kept = "in " + d.Data
	}
	exe := filepath.Base(os.Args[0])
	fmt.Fprintf(w, "quarry is ready: %d storage nodes, controller at %s\ndata is kept %s\na page that shows it: %s\n\n", d.Nodes, url, kept, page)
	fmt.Fprintf(w, "try, in another terminal:\n  %s%s slab alloc --data hello --name greeting\n  %s%s slab read @greeting\n  %s%s status\n  %s%s bench\n\nCtrl-C ends it.\n", exe, at, exe, at, exe, at, exe, at)
}
