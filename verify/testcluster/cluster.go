package testcluster

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/storagenode"
)

// Cluster is what New has started.
type Cluster struct {
	T          testing.TB
	Etcd       *etcdembed.Server
	Controller *controller.Controller
	Nodes      []*storagenode.Node
	Options    Options

	configs []storagenode.Config // of Nodes
	http    *http.Client
}

// Options of a cluster.
type Options struct {
	Nodes int // default 1; see NoNodes
	// Lease is short only where a test waits for its end; default 30 s. A starved machine
	// does not outlast it.
	Lease time.Duration
	Dir   bool // nodes keep files
	// ReplaceAfter is when replicas of a node that is gone are rebuilt on others; default the controller's.
	ReplaceAfter time.Duration
	RegionBytes  uint64 // default 16 MiB
	Capacity     uint64 // bytes of a node; default enough for 64 regions of 16 MiB or 4 larger ones
	// DefaultReplicas leaves the number of replicas to the controller where a client names none;
	// without it the default is 1.
	DefaultReplicas bool
	// Token that has every role; callers without a token are refused then.
	Token string
	// Listen are the nodes' addresses; see storagenode.Config.
	Listen string
	// Log shows what controllers and nodes say.
	Log bool
}

// leaderTTL keeps the only controller leading while the machine is starved.
const leaderTTL = 30 * time.Second

// probeTimeout keeps a node in the cluster while the machine is starved. A node that was
// closed refuses connections and is lost as soon as with the default.
const probeTimeout = 5 * time.Second

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

// NoNodes is a cluster whose storage nodes the test starts by itself.
const NoNodes = -1

// New starts a cluster that ends with the test.
func New(t testing.TB, o Options) *Cluster {
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	if o.Lease == 0 {
		o.Lease = 30 * time.Second
	}
	c := &Cluster{T: t, Options: o}
	var err error
	c.Etcd, err = etcdembed.Start(t.Context(), etcdembed.Config{NoSync: true, Log: quiet()})
	require.NoError(t, err)
	t.Cleanup(c.Etcd.Close)
	c.StartController("127.0.0.1:0")
	for i := range max(0, o.Nodes) {
		c.StartNode(i)
	}
	return c
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// StartController starts the controller on an address.
func (c *Cluster) StartController(listen string) {
	etcd, err := c.Etcd.Client()
	require.NoError(c.T, err)
	c.T.Cleanup(func() { etcd.Close() })
	c.Controller, err = controller.Start(c.T.Context(), controller.Config{
		Etcd: etcd, Listen: listen, Lease: c.Options.Lease, RegionBytes: max(c.Options.RegionBytes, proto.MinRegionBytes), Logger: c.logger(),
		ReplaceAfter: c.Options.ReplaceAfter, ProbeTimeout: probeTimeout, Alone: true, LeaderTTL: leaderTTL, Token: c.Options.Token,
	})
	require.NoError(c.T, err)
	ctrl := c.Controller
	c.T.Cleanup(func() { ctrl.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(c.T, ctrl.WaitLeader(ctx))
}

// NodeConfig is the configuration of node i.
func (c *Cluster) NodeConfig(i int) storagenode.Config {
	cfg := storagenode.Config{
		Controllers: []string{c.Controller.URL()}, Name: fmt.Sprintf("node%d", i+1), FailureDomain: fmt.Sprintf("/dc/rack%d/host%d", i+1, i+1),
		Socket: filepath.Join(c.T.TempDir(), "shm"), CapacityBytes: 4 * max(c.Options.RegionBytes, 16*proto.MinRegionBytes), Logger: c.logger(), Token: c.Options.Token, Listen: c.Options.Listen,
	}
	if c.Options.Capacity > 0 {
		cfg.CapacityBytes = c.Options.Capacity
	}
	return cfg
}

func (c *Cluster) logger() *slog.Logger {
	if c.Options.Log {
		return slog.New(slog.NewTextHandler(c.T.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return quiet()
}

// StartNode starts node i, from 0.
func (c *Cluster) StartNode(i int) *storagenode.Node {
	cfg := c.NodeConfig(i)
	if c.Options.Dir {
		cfg.Dir = c.T.TempDir()
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := storagenode.Start(ctx, cfg)
	require.NoError(c.T, err)
	c.T.Cleanup(func() { n.Close() })
	c.Nodes, c.configs = append(c.Nodes, n), append(c.configs, cfg)
	return n
}

// Dir is the data folder of node i, "" if it keeps none.
func (c *Cluster) Dir(i int) string { return c.configs[i].Dir }

// RestartNode starts a node that was closed again: with its folder if it keeps
// files, else with nothing.
func (c *Cluster) RestartNode(i int) *storagenode.Node {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := storagenode.Start(ctx, c.configs[i])
	require.NoError(c.T, err)
	c.T.Cleanup(func() { n.Close() })
	c.Nodes[i] = n
	return n
}

// Control is a client of the controller's RPCs, with every role.
func (c *Cluster) Control() quarrypbconnect.ControllerClient {
	if c.http == nil {
		c.http = &http.Client{Transport: &http.Transport{}}
		c.T.Cleanup(c.http.CloseIdleConnections)
	}
	return quarrypbconnect.NewControllerClient(c.http, c.Controller.URL(), connect.WithInterceptors(agentauth.Token(c.Options.Token)))
}

// Table is the distribution table as it is now; a leader is waited for.
func (c *Cluster) Table() *quarrypb.Table {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		res, err := c.Control().Status(ctx, connect.NewRequest(&quarrypb.StatusRequest{}))
		if err == nil {
			return res.Msg.Table
		}
		require.Equal(c.T, connect.CodeUnavailable, connect.CodeOf(err), "%v", err)
		time.Sleep(10 * time.Millisecond)
	}
}

// WaitInSync returns once every region is open with so many replicas in sync and no other.
func (c *Cluster) WaitInSync(replicas int) {
	c.T.Helper()
	require.Eventually(c.T, func() bool {
		for _, r := range c.Table().Regions {
			if r.State != quarrypb.RegionState_REGION_STATE_OPEN || len(r.Replicas) != replicas {
				return false
			}
			for _, p := range r.Replicas {
				if p.State != quarrypb.ReplicaState_REPLICA_STATE_IN_SYNC || p.Leaving {
					return false
				}
			}
		}
		return true
	}, patience, 20*time.Millisecond, "regions are in sync: %v", c.Table().Regions)
}

// Connect opens a client that ends with the test.
func (c *Cluster) Connect(cfg client.Config) *client.Client {
	cfg.Controllers = []string{c.Controller.URL()}
	if cfg.Replicas == 0 && !c.Options.DefaultReplicas {
		cfg.Replicas = 1
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = patience
	}
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cl, err := client.Connect(ctx, cfg)
	require.NoError(c.T, err)
	c.T.Cleanup(func() { cl.Close() })
	return cl
}
