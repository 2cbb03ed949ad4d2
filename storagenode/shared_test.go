package storagenode_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/cxl"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// sharedDevice is a file in place of a device, as one of its hosts has it.
func sharedDevice(t *testing.T, path string) *pmem.Device {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, f.Truncate(128<<20))
	return &pmem.Device{File: f, Path: path, Bytes: 128 << 20, Align: 2 << 20}
}

// shareConfig is a node of host-a that shares its device.
func shareConfig(t *testing.T, b *boss, path string) storagenode.Config {
	cfg := b.config(path)
	cfg.Format, cfg.Shared, cfg.Host, cfg.RDMA.Fabric = true, true, "host-a", storagenode.FabricTCP
	cfg.OnDevice(sharedDevice(t, path))
	return cfg
}

// sharing runs the agent of another host.
func sharing(t *testing.T, path, bootID string) (socket string, stop func()) {
	dev := sharedDevice(t, path)
	require.NoError(t, unix.Flock(int(dev.File.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	socket = filepath.Join(t.TempDir(), "s")
	ctx, cancel := context.WithCancel(context.Background())
	joining, joined := context.WithTimeout(ctx, patience)
	defer joined()
	a, err := cxl.NewAgent(joining, dev, cxl.AgentConfig{Host: "host-b", BootID: bootID, Socket: socket, Log: quiet()})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- a.Serve(ctx) }()
	return socket, func() {
		cancel()
		require.NoError(t, <-ended)
	}
}

// Clients of another host work on a node's regions, the table shows where they find them, and the controllers' fences and epochs hold there.
func TestANodeThatSharesItsDevice(t *testing.T) {
	b := newBoss(t)
	path := filepath.Join(t.TempDir(), "dax0.0")
	n := b.start(shareConfig(t, b, path))
	b.hostAndOpen(n, 1, 1)
	socket, stop := sharing(t, path, "boot-b")
	endpoint := func() bool {
		list := b.registrations()
		for _, e := range list[len(list)-1].Node.Endpoints {
			if e.Provider == quarrypb.Provider_PROVIDER_SHM && e.Address == socket && e.HostId == "boot-b" {
				return true
			}
		}
		return false
	}
	require.Eventually(t, endpoint, patience, time.Millisecond)

	there, err := b.dial(shm.NewDialer(), socket, 1, 0, 1, 1)
	require.NoError(t, err)
	require.NoError(t, there.write(dataOff, 7))
	here, err := b.dial(shm.NewDialer(), n.Stats().Socket, 2, 0, 1, 1)
	require.NoError(t, err)
	byTCP, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 3, 0, 1, 1)
	require.NoError(t, err)
	for _, l := range []*lane{here, byTCP} {
		got, err := l.read(dataOff, 64)
		require.NoError(t, err)
		require.EqualValues(t, 7, got[0], "one memory")
	}
	require.Zero(t, call(t, b.agent(n).Fence, &quarrypb.FenceRequest{Serials: []uint64{1}, ControllerTerm: 1}))
	require.ErrorIs(t, there.write(dataOff, 8), rdma.ErrRevoked)
	b.hostAndOpen(n, 2, 1)
	there, err = b.dial(shm.NewDialer(), socket, 4, 0, 2, 1)
	require.NoError(t, err)
	require.NoError(t, there.write(dataOff, 9))
	require.Zero(t, call(t, b.agent(n).OpenRegion, &quarrypb.OpenRegionRequest{Region: 2, Epoch: 2, ControllerTerm: 1}))
	require.ErrorIs(t, there.write(dataOff, 10), rdma.ErrKey, "of an earlier epoch")

	stop()
	require.Eventually(t, func() bool { return !endpoint() }, patience, time.Millisecond)
	require.NoError(t, n.Close())

	cfg := shareConfig(t, b, path)
	cfg.Shared = false
	_, err = storagenode.Start(t.Context(), cfg)
	require.ErrorContains(t, err, "--shared was given for one and not for the other")
	b.start(shareConfig(t, b, path))
	list := b.registrations()
	require.Len(t, list[len(list)-1].Found, 2, "its regions")
}

// A device behind which the kernel lists no NVDIMM is volatile unless the operator says that it is not.
func TestHazard220_UnlistedMedium(t *testing.T) {
	for _, c := range []struct {
		medium     string
		persistent bool
	}{{"", false}, {storagenode.MediumAuto, false}, {storagenode.MediumVolatile, false}, {storagenode.MediumPersistent, true}} {
		path := filepath.Join(t.TempDir(), "dax0.0")
		if fs, err := host.FileSystemOf(filepath.Dir(path)); err != nil || fs.Volatile != nil {
			t.Skip("folders of tests are not on a disk: the file in place of the device survives nothing")
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		require.NoError(t, f.Truncate(64<<20))
		b := newBoss(t)
		cfg := b.config(path)
		cfg.Format, cfg.Medium = true, c.medium
		cfg.OnDevice(&pmem.Device{File: f, Path: path, Bytes: 64 << 20, Align: 2 << 20, Unlisted: true})
		n := b.start(cfg)
		list := b.registrations()
		node := list[len(list)-1].Node
		require.Equal(t, c.persistent, node.Persistent, "--medium %q", c.medium)
		require.Equal(t, c.persistent, node.Persistence.Kind != pmem.KindVolatile, "--medium %q", c.medium)
		require.NoError(t, n.Close())
	}
	b := newBoss(t)
	cfg := b.config("/dev/null")
	cfg.Medium = "paper"
	_, err := storagenode.Start(t.Context(), cfg)
	require.ErrorContains(t, err, "want auto, persistent or volatile")
}

// On a volatile medium regions serve, and none is said to be durable.
func TestVolatileMedium(t *testing.T) {
	b := newBoss(t)
	path := filepath.Join(t.TempDir(), "dax0.0")
	cfg := shareConfig(t, b, path)
	cfg.Medium = storagenode.MediumVolatile
	n := b.start(cfg)
	b.hostAndOpen(n, 1, 1)
	list := b.registrations()
	node := list[len(list)-1].Node
	require.False(t, node.Persistent)
	require.Equal(t, pmem.KindVolatile, node.Persistence.Kind)
	socket, stop := sharing(t, path, "boot-b")
	defer stop()
	var l *lane
	require.Eventually(t, func() (ok bool) {
		var err error
		l, err = b.dial(shm.NewDialer(), socket, 1, 0, 1, 1)
		return err == nil
	}, patience, time.Millisecond)
	require.NoError(t, l.write(dataOff, 7))
	require.Equal(t, rdma.NoFlush, l.to.Window.Flush)
	cfg = b.config(t.TempDir())
	cfg.Medium = storagenode.MediumVolatile
	_, err := storagenode.Start(t.Context(), cfg)
	require.ErrorContains(t, err, "are for a device given by --data")
	cfg = shareConfig(t, b, path)
	cfg.RDMA.Fabric = ""
	_, err = storagenode.Start(t.Context(), cfg)
	require.ErrorContains(t, err, "--shared needs --fabric tcp")
}

// TestSharedDeviceUnderARealController: etcd, controller, node and client as they are. The client works by the agent of its host alone, a session
// that is revoked ends there, and the agent serves the node's next incarnation.
func TestSharedDeviceUnderARealController(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: testcluster.NoNodes})
	path := filepath.Join(t.TempDir(), "dax0.0")
	config := func() storagenode.Config {
		cfg := c.NodeConfig(0)
		cfg.Dir, cfg.Socket, cfg.CapacityBytes = path, "none", 64<<20
		cfg.Format, cfg.Shared, cfg.Host, cfg.RDMA.Fabric = true, true, "host-a", storagenode.FabricTCP
		cfg.OnDevice(sharedDevice(t, path))
		return cfg
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	n, err := storagenode.Start(ctx, config())
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	require.NoError(t, err)
	_, stop := sharing(t, path, strings.TrimSpace(string(id)))
	defer stop()

	first := c.Connect(client.Config{Transport: client.TransportSHM})
	var ref client.Ref
	eventually(t, "the table shows the agent's socket", func() bool {
		ref, err = first.Alloc(ctx, []byte("kept"), client.AllocOptions{})
		return err == nil
	})
	byTCP := c.Connect(client.Config{Transport: client.TransportTCP})
	got, err := byTCP.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "kept", string(got))
	require.NoError(t, byTCP.Write(ctx, ref, []byte("changed")))
	got, err = first.Read(ctx, ref, nil)
	require.NoError(t, err)
	require.Equal(t, "changed", string(got), "one memory")

	hc := &http.Client{Transport: &http.Transport{}}
	defer hc.CloseIdleConnections()
	ctl := quarrypbconnect.NewControllerClient(hc, c.Controller.URL())
	second := c.Connect(client.Config{Transport: client.TransportSHM})
	require.NoError(t, second.Write(ctx, ref, []byte("again")))
	revoked := second.Stats().Session // the client opens another one
	_, err = ctl.RevokeSession(ctx, connect.NewRequest(&quarrypb.RevokeSessionRequest{Session: revoked}))
	require.NoError(t, err)
	eventually(t, "the session is fenced at the agent too", func() bool {
		list, err := ctl.ListSessions(ctx, connect.NewRequest(&quarrypb.ListSessionsRequest{}))
		require.NoError(t, err)
		return !slices.ContainsFunc(list.Msg.Sessions, func(s *quarrypb.Session) bool { return s.Session == revoked && s.State != "fenced" })
	})

	require.NoError(t, n.Close())
	n, err = storagenode.Start(ctx, config())
	require.NoError(t, err)
	t.Cleanup(func() { n.Close() })
	eventually(t, "the agent serves the next incarnation", func() bool {
		rctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		got, err := first.Read(rctx, ref, nil)
		return err == nil && string(got) == "again"
	})
	require.NoError(t, first.Write(ctx, ref, []byte("on")))
}
