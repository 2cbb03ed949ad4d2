// Package testcluster runs a whole cluster inside a test: etcd, controllers and
// storage nodes on real sockets, regions of 16 MiB.
package testcluster

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/storagenode"
)

// Cluster is what New has started.
type Cluster struct {
	T          testing.TB
	Etcd       *etcdembed.Server
	Controller *controller.Controller
	Nodes      []*storagenode.Node
	Options    Options
}

// Options of a cluster.
type Options struct {
	Nodes int           // default 1
	Lease time.Duration // default 3 s
	Dir   bool          // nodes keep files
}

// New starts a cluster that ends with the test.
func New(t testing.TB, o Options) *Cluster {
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	c := &Cluster{T: t, Options: o}
	var err error
	c.Etcd, err = etcdembed.Start(etcdembed.Config{NoSync: true, Log: quiet()})
	require.NoError(t, err)
	t.Cleanup(c.Etcd.Close)
	c.StartController("127.0.0.1:0")
	for i := range o.Nodes {
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
		Etcd: etcd, Listen: listen, Lease: c.Options.Lease, RegionBytes: proto.MinRegionBytes, Logger: quiet(),
	})
	require.NoError(c.T, err)
	ctrl := c.Controller
	c.T.Cleanup(func() { ctrl.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(c.T, ctrl.WaitLeader(ctx))
}

// NodeConfig is the configuration of node i.
func (c *Cluster) NodeConfig(i int) storagenode.Config {
	cfg := storagenode.Config{
		Controllers: []string{c.Controller.URL()}, Name: fmt.Sprintf("node%d", i+1), FailureDomain: fmt.Sprintf("/dc/rack%d/host%d", i+1, i+1),
		Socket: filepath.Join(c.T.TempDir(), "shm"), CapacityBytes: 64 * proto.MinRegionBytes, Logger: quiet(),
	}
	return cfg
}

// StartNode starts node i, from 0.
func (c *Cluster) StartNode(i int) *storagenode.Node {
	cfg := c.NodeConfig(i)
	if c.Options.Dir {
		cfg.Dir = c.T.TempDir()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	n, err := storagenode.Start(ctx, cfg)
	require.NoError(c.T, err)
	c.T.Cleanup(func() { n.Close() })
	c.Nodes = append(c.Nodes, n)
	return n
}

// Connect opens a client that ends with the test.
func (c *Cluster) Connect(cfg client.Config) *client.Client {
	cfg.Controllers = []string{c.Controller.URL()}
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cl, err := client.Connect(ctx, cfg)
	require.NoError(c.T, err)
	c.T.Cleanup(func() { cl.Close() })
	return cl
}
