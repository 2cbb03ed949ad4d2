package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/quarrystore/quarry/cmd/quarry/collect"
	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/procs"
	"github.com/quarrystore/quarry/storagenode"
)

// controllerCmd runs a controller, or changes which controllers there are.
type controllerCmd struct {
	Serve   controllerServeCmd   `cmd:"" default:"withargs" help:"Run a controller. The word serve may be left out; quarry controller serve --help shows the flags."`
	List    controllerListCmd    `cmd:"" help:"List controllers, and the members of their etcd."`
	Add     controllerAddCmd     `cmd:"" help:"Add a member for one more controller, and show how to start it."`
	Remove  controllerRemoveCmd  `cmd:"" help:"Remove a controller from the cluster."`
	Replace controllerReplaceCmd `cmd:"" help:"Replace a controller whose disk is lost, and show how to start its successor."`
}

// etcdFlags say where a controller's state lives.
type etcdFlags struct {
	Etcd []string `placeholder:"URL" help:"Endpoints of an etcd cluster; without, etcd runs inside this process."`
	CA   string   `name:"etcd-ca" placeholder:"FILE" help:"Certificate authorities of --etcd, PEM; default the system's."`
	Cert string   `name:"etcd-cert" placeholder:"FILE" help:"Certificate that --etcd is shown, PEM."`
	Key  string   `name:"etcd-key" placeholder:"FILE" help:"Key of --etcd-cert, PEM."`
	Data string   `placeholder:"DIR" help:"Folder of the embedded etcd's data; without it, nothing survives a restart."`
	Peer string   `name:"etcd-peer" placeholder:"URL" help:"Where the embedded etcds of other controllers reach this one, such as https://10.0.0.1:7424."`
	All  string   `name:"initial-cluster" placeholder:"NAME=URL,..." help:"The --name and --etcd-peer of every controller, this one too; for the first start, which waits for all of them."`
}

// store connects to etcd, or starts one. stop ends what was started. watched says that the
// pulse begins elections of etcd.
func (f *etcdFlags) store(ctx context.Context, a *app, name string, watched bool) (cli *clientv3.Client, srv *etcdembed.Server, failed <-chan error, stop func(), err error) {
	if len(f.Etcd) > 0 {
		if cli, err = f.connect(ctx, a); err != nil {
			return nil, nil, nil, nil, err
		}
		return cli, nil, nil, func() { cli.Close() }, nil
	}
	switch {
	case f.CA != "" || f.Cert != "" || f.Key != "":
		return nil, nil, nil, nil, usagef("--etcd-ca, --etcd-cert and --etcd-key are for --etcd; the embedded etcd uses --tls-cert, --tls-key and --tls-ca")
	case f.All != "" && (f.Peer == "" || name == ""):
		return nil, nil, nil, nil, usagef("several controllers with their own etcd need --name, --etcd-peer and --initial-cluster each")
	case f.All != "" && f.Data == "":
		return nil, nil, nil, nil, usagef("--initial-cluster is given without --data: a controller that keeps nothing could not start again as the same member")
	case f.Peer == "":
		name = "" // the only member needs no name of its own
	}
	srv, err = etcdembed.Start(ctx, etcdembed.Config{Dir: f.Data, Name: name, PeerURL: f.Peer, TLS: a.trust, Token: a.cli.Token, Watched: watched, InitialCluster: f.All, Waiting: a.waitsForMembers, Log: a.etcdLog(), NoSync: f.Data == ""})
	if err != nil {
		return nil, nil, nil, nil, err
	}
	if cli, err = srv.Client(); err != nil {
		srv.Close()
		return nil, nil, nil, nil, err
	}
	return cli, srv, srv.Err(), func() { cli.Close(); srv.Close() }, nil
}

// connect connects to the etcd of --etcd, and returns when it has answered a read.
func (f *etcdFlags) connect(ctx context.Context, a *app) (*clientv3.Client, error) {
	if f.Data != "" || f.Peer != "" || f.All != "" {
		return nil, usagef("--etcd is given: --data, --etcd-peer and --initial-cluster are for the embedded etcd")
	}
	var secured *tls.Config
	if files := (identity.Files{Cert: f.Cert, Key: f.Key, CA: f.CA}); files != (identity.Files{}) {
		src, err := identity.Open(files, a.log)
		if err != nil {
			return nil, usagef("--etcd: %w", err)
		}
		if i := slices.IndexFunc(f.Etcd, func(u string) bool { return !strings.HasPrefix(u, "https://") }); i >= 0 {
			return nil, usagef("--etcd %s: want https:// where --etcd-ca or --etcd-cert is given", f.Etcd[i])
		}
		secured = src.ForeignClient()
	}
	cli, err := clientv3.New(clientv3.Config{Endpoints: f.Etcd, TLS: secured, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		return nil, usagef("etcd: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := cli.Get(ctx, "/"); err != nil {
		cli.Close()
		return nil, fmt.Errorf("%w: etcd %v: %w", errNoController, f.Etcd, err)
	}
	return cli, nil
}

// waitsForMembers says what the start of a controller waits for.
func (a *app) waitsForMembers(silent []string) {
	if len(silent) == 0 {
		fmt.Fprintln(a.errOut, "quarry: waiting for enough of the other controllers to form a quorum; quarry controller list on another host shows them")
		return
	}
	fmt.Fprintf(a.errOut, "quarry: first start: waiting for controller %s\n", strings.Join(silent, ", "))
}

// guardPeer is guard for the port of the embedded etcd. A token protects that port by TLS alone.
func (f *etcdFlags) guardPeer(a *app) (exposed bool, err error) {
	u, err := url.Parse(f.Peer)
	if err != nil || u.Host == "" {
		return false, nil // none, or refused where it is used
	}
	return a.guard(u.Scheme == "https", "--etcd-peer and --initial-cluster with https:// (and certificates or --token)", u.Host)
}

type controllerServeCmd struct {
	etcdFlags
	metricsFlags
	Listen      string        `default:"127.0.0.1:7420" placeholder:"HOST:PORT" help:"Port for clients, nodes and operators; port 0 takes a free one."`
	Advertise   string        `placeholder:"URL" help:"How others reach this controller; default from --listen."`
	Gossip      string        `name:"gossip-listen" placeholder:"HOST:PORT" help:"UDP port of the pulse, the cluster's failure detector; none turns it off. Default a free port beside --listen."`
	Name        string        `placeholder:"NAME" help:"Name among the controllers; default the host's name."`
	Lease       time.Duration `default:"3s" help:"Lease of sessions: a dead client blocks what it was writing for about that long."`
	RegionBytes sizeFlag      `default:"2GiB" help:"Largest size of regions that are made on demand; the first of a kind have 64 MiB, later ones double what there is."`
	MaxNames    uint64        `default:"1048576" placeholder:"N" help:"Most names in the placement library."`
	NameRate    sizeFlag      `default:"1MiB" help:"Most bytes of names that one client host may change a second, with bursts of eight seconds."`
	Replace     time.Duration `name:"replace-after" default:"1m" help:"How long a storage node that is gone may come back before its replicas are rebuilt on others."`
	RebuildRate sizeFlag      `default:"0" help:"Most bytes a second that are copied to one joining replica; 0 for no bound."`
}

// Run starts etcd or connects to it, then the controller, and prints that it is ready once a controller leads. It
// returns when the context ends, or with the first error of the controller, of its etcd or of the port for
// metrics.
func (c *controllerServeCmd) Run(ctx context.Context, a *app) error {
	own, err := a.own(identity.Controller)
	if err != nil {
		return err
	}
	exposed, err := a.guardCluster(c.Listen)
	if err != nil {
		return err
	}
	exposedPeer, err := c.guardPeer(a)
	if err != nil {
		return err
	}
	cert, nodes := a.serving(identity.Node)
	port, err := c.metricsFlags.open(ctx, a, "controller")
	if err != nil {
		return err
	}
	defer port.close()
	etcd, member, failed, stop, err := c.store(ctx, a, c.Name, c.Gossip != controller.NoGossip)
	if err != nil {
		return err
	}
	defer stop()
	controller.Version, storagenode.Version = version, version
	pages := a.console()
	cfg := controller.Config{Pages: pages, Etcd: etcd, Alone: len(c.Etcd) == 0 && c.Peer == "", Embedded: len(c.Etcd) == 0,
		Names: controller.NameLimits{Most: c.MaxNames, BytesPerSecond: uint64(c.NameRate)}, Listen: c.Listen, Advertise: c.Advertise, GossipListen: c.Gossip, Name: c.Name, Lease: c.Lease,
		RegionBytes: uint64(c.RegionBytes), ReplaceAfter: c.Replace, RebuildBytesPerSecond: uint64(c.RebuildRate), Token: a.cli.Token, ID: own, Insecure: exposed || exposedPeer, TLS: cert, AgentTLS: nodes, PeerTLS: a.tls, Logger: a.log}
	if member != nil {
		cfg.Member = member
	}
	if a.trust != nil {
		cfg.Trusts = a.trust.Trusts
	}
	srv, err := controller.Start(ctx, cfg)
	if err != nil {
		return inUse(err)
	}
	defer srv.Close()
	look, blind := context.WithCancel(ctx)
	defer blind()
	go pages.Run(look, srv.URL())
	go procs.Follow(look)
	port.watch(collect.NewController(srv))
	if len(c.Etcd) == 0 {
		port.watch(collect.Etcd{})
	}
	wctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := srv.WaitLeader(wctx); err != nil {
		return err
	}
	err = a.ready(port.tell(map[string]string{"ready": "controller", "url": srv.URL()}), func(w io.Writer) {
		fmt.Fprintf(w, "controller ready at %s\n", srv.URL())
		port.text(w)
	})
	if err != nil {
		return err
	}
	return waitFor(ctx, srv.Err(), failed, port.failed())
}
