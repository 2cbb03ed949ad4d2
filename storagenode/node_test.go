package storagenode_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
)

const dataOff = 1 << 20 // of a region of 16 MiB

// A node says what a loss of power leaves of its regions, and how they are flushed, as it is where they lie.
func TestSaysWhatItsRegionsHave(t *testing.T) {
	b := newBoss(t)
	memory := b.start(b.config(""))
	require.Equal(t, pmem.Persistence{Kind: "volatile", Flush: "none", Method: "none"}, memory.Stats().Persistence)
	require.NoError(t, memory.Close())
	dir := t.TempDir()
	fs, err := host.FileSystemOf(dir)
	require.NoError(t, err)
	want := pmem.Persistence{Kind: "volatile", Flush: "none", Method: "none"}
	if fs.Volatile == nil {
		want = pmem.Persistence{Kind: "file", Flush: "msync", Method: "processor"} // no test machine has its temporary files on DAX
	}
	n := newBoss(t)
	require.Equal(t, want, n.start(n.config(dir)).Stats().Persistence)
}

func TestServesTcpAndShmAtOnceAndLeavesNothingBehind(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	t.Run("incarnation", func(t *testing.T) {
		b := newBoss(t)
		cfg := b.config("")
		n := b.start(cfg)
		b.hostAndOpen(n, 1, 1)
		st := n.Stats()
		over, err := b.dial(tcp.Dialer{}, st.TCP, 1, 0, 1, 1)
		require.NoError(t, err)
		near, err := b.dial(shm.NewDialer(), st.Socket, 1, 1, 1, 1)
		require.NoError(t, err)
		require.NoError(t, over.write(dataOff, 7))
		got, err := near.read(dataOff, 64)
		require.NoError(t, err)
		require.Equal(t, over.buf, got, "both reach the same memory")
		require.Len(t, n.Stats().Sessions, 1)
		require.Len(t, n.Stats().Regions, 1)
		require.GreaterOrEqual(t, n.Stats().ResidentBytes, uint64(proto.RegionHeaderBytes))
		eventually(t, "heartbeats tell what is resident", func() (ok bool) {
			b.with(func() { ok = b.beats > 1 && b.resident == n.Stats().ResidentBytes })
			return ok
		})

		require.NoError(t, n.Close(), "it has given up waiting for nothing")
		require.NoError(t, n.Close(), "once more does nothing")
		require.ErrorIs(t, over.write(dataOff, 8), rdma.ErrBroken)
		require.Error(t, near.write(dataOff, 8))
		require.NoFileExists(t, cfg.Socket)
		_, err = net.DialTimeout("tcp", st.TCP, time.Second)
		require.Error(t, err)
	})
	goleak.VerifyNone(t, leaks)
}

func TestObeysItsOwnClusterOnly(t *testing.T) {
	b, other := newBoss(t), newBoss(t)
	n := b.start(b.config(""))
	require.Equal(t, connect.CodeUnauthenticated, call(t, other.agent(n).HostRegion, b.hostReq(9, 1)))
	foreign := b.hostReq(1, 1)
	foreign.Cluster = other.cluster[:]
	require.Equal(t, connect.CodePermissionDenied, call(t, b.agent(n).HostRegion, foreign))
	short := b.hostReq(1, 1)
	short.Uuid = short.Uuid[:15]
	require.Equal(t, connect.CodeInvalidArgument, call(t, b.agent(n).HostRegion, short))
	require.Empty(t, n.Stats().Regions)
	// A ticket of another cluster, or of none, opens nothing.
	_, err := other.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 1)
	require.ErrorIs(t, err, rdma.ErrTicket)
}

func TestRegionsAreLimitedByCapacity(t *testing.T) {
	b := newBoss(t)
	n := b.start(b.config(t.TempDir()))
	a := b.agent(n)
	for r := range uint32(4) {
		require.Zero(t, call(t, a.HostRegion, b.hostReq(1, r+1)))
	}
	require.Equal(t, connect.CodeResourceExhausted, call(t, a.HostRegion, b.hostReq(1, 5)))
	require.Equal(t, uint64(64<<20), n.Stats().HostedBytes)
	require.GreaterOrEqual(t, n.Stats().ResidentBytes, uint64(64<<20), "all of it is reserved")
	require.Zero(t, call(t, a.DropRegion, &quarrypb.DropRegionRequest{Region: 4, ControllerTerm: 1}))
	require.Zero(t, call(t, a.HostRegion, b.hostReq(1, 5)))
}

// TestHazard14_DeposedControllerIsRefused: another controller leads; what the former
// one says comes late, twice, and also to the next incarnation of the node.
func TestHazard14_DeposedControllerIsRefused(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	b.hostAndOpen(n, 1, 1)
	a := b.agent(n)
	open := func(term, epoch uint64) connect.Code {
		return call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: epoch, ControllerTerm: term})
	}
	require.Zero(t, open(2, 2), "the new leader")
	old := []func() connect.Code{
		func() connect.Code { return open(1, 3) },
		func() connect.Code {
			return call(t, a.CloseRegion, &quarrypb.CloseRegionRequest{Region: 1, Epoch: 9, ControllerTerm: 1})
		},
		func() connect.Code {
			return call(t, a.DropRegion, &quarrypb.DropRegionRequest{Region: 1, Epoch: 9, ControllerTerm: 1})
		},
		func() connect.Code {
			return call(t, a.Fence, &quarrypb.FenceRequest{Serials: []uint64{1}, ControllerTerm: 1})
		},
		func() connect.Code {
			h := b.hostReq(1, 1)
			h.Zero, h.Epoch = true, 9
			return call(t, a.HostRegion, h)
		},
	}
	for i, f := range old {
		require.Equal(t, connect.CodeFailedPrecondition, f(), "command %d", i)
	}
	c, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 2)
	require.NoError(t, err, "the region is open under the new epoch still")
	require.NoError(t, c.write(dataOff, 5))
	// Commands of the new leader that come late do no harm either.
	require.Equal(t, connect.CodeFailedPrecondition, open(2, 1))
	require.Zero(t, call(t, a.CloseRegion, &quarrypb.CloseRegionRequest{Region: 1, Epoch: 1, ControllerTerm: 2}))
	require.NoError(t, c.write(dataOff, 6))

	require.NoError(t, n.Close())
	n = b.startAs(2, dir)
	a = b.agent(n)
	for i, f := range old {
		require.Equal(t, connect.CodeFailedPrecondition, f(), "command %d after a restart", i)
	}
	require.Equal(t, connect.CodeFailedPrecondition, open(2, 2), "it served epoch 2 in another incarnation")
	require.Zero(t, open(2, 3))
	c, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 3)
	require.NoError(t, err)
	got, err := c.read(dataOff, 64)
	require.NoError(t, err)
	require.Equal(t, byte(6), got[0])

	// A registration with the former leader is refused, another controller asked.
	require.NoError(t, n.Close())
	b.with(func() { b.answer.ControllerTerm = 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = storagenode.Start(ctx, b.config(dir))
	require.ErrorContains(t, err, "term 1, the node obeys term 2")
}

// TestHazard32_OldKeysNeverOpenANewIncarnation: an agent restarts again and again; keys of
// its former incarnations fit nothing, neither on its port nor by chance.
func TestHazard32_OldKeysNeverOpenANewIncarnation(t *testing.T) {
	b := newBoss(t)
	const starts = 60 // the chance that a wrong key fits is 2^-64 each
	seen, keys := map[uint64]bool{}, map[uint64]bool{}
	var old []rdma.Window
	dir := t.TempDir()
	for incarnation := range starts {
		cfg := b.config("")
		if incarnation%2 == 1 {
			cfg.Dir = dir
		}
		n := b.start(cfg)
		require.False(t, seen[n.Stats().Incarnation])
		seen[n.Stats().Incarnation] = true
		a := b.agent(n)
		require.Zero(t, call(t, a.HostRegion, b.hostReq(1, 1)))
		epoch := uint64(incarnation + 1)
		d := tcp.Dialer{}
		if _, err := b.dial(d, n.Stats().TCP, 1, 0, 1, epoch); incarnation > 0 {
			require.ErrorIs(t, err, rdma.ErrKey, "nothing is served before a controller opens it")
			_, err = b.dial(d, n.Stats().TCP, 1, 0, 1, epoch-1)
			require.ErrorIs(t, err, rdma.ErrKey)
		}
		require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: epoch, ControllerTerm: 1}))
		c, err := b.dial(d, n.Stats().TCP, 1, 0, 1, epoch)
		require.NoError(t, err)
		require.NoError(t, c.write(dataOff, 0xaa))
		now := c.to.Window
		for _, w := range old {
			c.to.Window = w
			require.ErrorIs(t, c.write(dataOff, byte(incarnation)), rdma.ErrKey)
		}
		c.to.Window = now
		got, err := c.read(dataOff, 64)
		require.NoError(t, err)
		require.Equal(t, byte(0xaa), got[0])
		require.False(t, keys[now.Key])
		keys[now.Key] = true
		old = append(old, now)
		require.NoError(t, n.Close())
	}
}

// TestFenceUnderLoad: clients write at full rate on both fabrics; when Fence has
// returned no byte of theirs changes any more, and none of them comes in again.
func TestFenceUnderLoad(t *testing.T) {
	b := newBoss(t)
	n := b.start(b.config(t.TempDir()))
	b.hostAndOpen(n, 1, 1)
	st := n.Stats()
	watch, err := b.dial(tcp.Dialer{}, st.TCP, 1000, 0, 1, 1)
	require.NoError(t, err)

	const lanes = 4
	near := shm.NewDialer()
	for serial := uint64(1); serial <= 8; serial++ {
		var wg sync.WaitGroup
		var done atomic.Uint64
		for lane := range uint32(lanes) {
			d, addr := rdma.Dialer(tcp.Dialer{}), st.TCP
			if lane%2 == 1 {
				d, addr = near, st.Socket
			}
			c, err := b.dial(d, addr, serial, lane, 1, 1)
			require.NoError(t, err)
			wg.Go(func() {
				for v := byte(0); ; v++ {
					if c.write(dataOff+64*uint64(lane), v) != nil {
						return
					}
					done.Add(1)
				}
			})
		}
		eventually(t, "writes", func() bool { return done.Load() > 1000 })
		start := time.Now()
		require.Zero(t, call(t, b.agent(n).Fence, &quarrypb.FenceRequest{Serials: []uint64{serial}, ControllerTerm: 1}))
		took := time.Since(start)
		before, err := watch.read(dataOff, 64*lanes)
		require.NoError(t, err)
		all := make(chan struct{})
		go func() { wg.Wait(); close(all) }()
		select {
		case <-all:
		case <-time.After(patience):
			t.Fatal("fenced clients still write")
		}
		after, err := watch.read(dataOff, 64*lanes)
		require.NoError(t, err)
		require.Equal(t, before, after, "bytes changed after the fence")
		_, err = b.dial(tcp.Dialer{}, st.TCP, serial, 0, 1, 1)
		require.ErrorIs(t, err, rdma.ErrRevoked)
		_, err = b.dial(near, st.Socket, serial, 1, 1, 1)
		require.ErrorIs(t, err, rdma.ErrRevoked)
		t.Logf("session %d: fenced in %v after %d writes", serial, took, done.Load())
	}
	require.NoError(t, watch.write(dataOff, 1), "others go on")
}

func TestFencedSessionsStayOutOverRestarts(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	require.Zero(t, call(t, b.agent(n).Fence, &quarrypb.FenceRequest{Serials: []uint64{5}, ControllerTerm: 1}))
	require.NoError(t, n.Close())
	// The controller says that 5 lives: it is older than the fence.
	b.with(func() { b.answer.NextSerial, b.answer.LiveSerials = 8, []uint64{5, 6} })
	n = b.start(b.config(dir))
	b.hostAndOpen(n, 1, 1)
	for serial, want := range map[uint64]error{5: rdma.ErrRevoked, 6: nil, 7: rdma.ErrRevoked, 8: nil} {
		_, err := b.dial(tcp.Dialer{}, n.Stats().TCP, serial, 0, 1, 1)
		require.ErrorIs(t, err, want, "serial %d", serial)
	}
}

func TestZeroedMemoryIsZeroButForItsHeader(t *testing.T) {
	for name, dir := range map[string]string{"memory": "", "files": t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			b := newBoss(t)
			n := b.start(b.config(dir))
			b.hostAndOpen(n, 1, 1)
			c, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 1)
			require.NoError(t, err)
			for off := uint64(proto.RegionHeaderBytes); off < proto.MinRegionBytes; off += 1 << 20 {
				require.NoError(t, c.write(off, 0xff))
			}
			full := n.Stats().ResidentBytes
			a := b.agent(n)
			zero := b.hostReq(1, 1)
			zero.Zero, zero.Epoch = true, 1
			require.Equal(t, connect.CodeFailedPrecondition, call(t, a.HostRegion, zero), "not while it is open")
			require.Zero(t, call(t, a.CloseRegion, &quarrypb.CloseRegionRequest{Region: 1, Epoch: 2, ControllerTerm: 1}))
			require.Error(t, c.write(dataOff, 1))
			require.Equal(t, connect.CodeFailedPrecondition, call(t, a.HostRegion, zero), "it has heard of epoch 2")
			zero.Epoch = 2
			require.Zero(t, call(t, a.HostRegion, zero))
			require.GreaterOrEqual(t, n.Stats().ResidentBytes, full, "it stays reserved")
			require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 3, ControllerTerm: 1}))
			c, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 3)
			require.NoError(t, err)
			head, err := c.read(0, proto.RegionHeaderBytes)
			require.NoError(t, err)
			h, err := proto.DecodeRegionHeader(head)
			require.NoError(t, err)
			require.Equal(t, uint64(3), h.Epoch)
			require.Equal(t, n.Stats().Incarnation, h.Incarnation)
			for off := uint64(proto.RegionHeaderBytes); off < proto.MinRegionBytes; {
				part, err := c.read(off, int(min(1<<20, proto.MinRegionBytes-off)))
				require.NoError(t, err)
				require.Equal(t, len(part), bytes.Count(part, []byte{0}), "at %d", off)
				off += uint64(len(part))
			}
		})
	}
}

func TestFollowsTheLeaderAndRegistersAgainWhenUnknown(t *testing.T) {
	b := newBoss(t)
	standby := newBoss(t)
	standby.leader = b.url
	cfg := b.config("")
	cfg.Controllers = []string{standby.url} // which names a leader that is not configured
	n := b.start(cfg)
	b.hostAndOpen(n, 1, 4)
	require.Empty(t, b.registrations()[0].Found)
	b.with(func() { b.forget = true })
	eventually(t, "a second registration", func() bool {
		return len(b.registrations()) == 2
	})
	again := b.registrations()[1]
	require.Equal(t, uint32(1), again.Node.Id)
	require.Equal(t, n.Stats().Incarnation, again.Node.Incarnation)
	require.Equal(t, b.cluster[:], again.Cluster)
	require.Len(t, again.Found, 1)
	require.Equal(t, uint64(4), again.Found[0].Epoch)
	// It goes on serving while nobody leads, and comes back.
	b.with(func() { b.leader = standby.url })
	c, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 4)
	require.NoError(t, err)
	require.NoError(t, c.write(dataOff, 1))
	var beats int
	b.with(func() { b.leader, beats = "", b.beats })
	eventually(t, "heartbeats again", func() (ok bool) {
		b.with(func() { ok = b.beats > beats })
		return ok
	})
}

func TestLongFenceListAsksForRegistration(t *testing.T) {
	b := newBoss(t)
	n := b.start(b.config(""))
	serials := make([]uint64, 1200)
	for i := range serials {
		serials[i] = uint64(i + 1)
	}
	b.with(func() { b.answer.NextSerial = 1201 })
	require.Zero(t, call(t, b.agent(n).Fence, &quarrypb.FenceRequest{Serials: serials, ControllerTerm: 1}))
	eventually(t, "a second registration", func() bool {
		return len(b.registrations()) == 2
	})
	_, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1200, 0, 1, 1)
	require.ErrorIs(t, err, rdma.ErrRevoked)
}

func TestConfigIsChecked(t *testing.T) {
	b := newBoss(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	for want, change := range map[string]func(*storagenode.Config){
		"no controller given":                      func(c *storagenode.Config) { c.Controllers = nil },
		`controller "localhost:1"`:                 func(c *storagenode.Config) { c.Controllers = []string{"localhost:1"} },
		`name "a b"`:                               func(c *storagenode.Config) { c.Name = "a b" },
		`failure domain "dc/rack"`:                 func(c *storagenode.Config) { c.FailureDomain = "dc/rack" },
		`failure domain "/a//b"`:                   func(c *storagenode.Config) { c.FailureDomain = "/a//b" },
		`failure domain "/1/2/3/4/5/6/7/8/9"`:      func(c *storagenode.Config) { c.FailureDomain = "/1/2/3/4/5/6/7/8/9" },
		`failure domain "/a/b c"`:                  func(c *storagenode.Config) { c.FailureDomain = "/a/b c" },
		"address already in use":                   func(c *storagenode.Config) { c.Listen = taken.Addr().String() },
		"agent: listen":                            func(c *storagenode.Config) { c.AgentListen = taken.Addr().String() },
		"the fabric port listens on all addresses": func(c *storagenode.Config) { c.Listen = ":0" },
		"--listen \"a b=127.0.0.1:0\"":             func(c *storagenode.Config) { c.Listen = "a b=127.0.0.1:0" },
		"--listen \"127.0.0.1\"":                   func(c *storagenode.Config) { c.Listen = "a=127.0.0.1:0,127.0.0.1" },
		"is at all addresses: a node with several": func(c *storagenode.Config) { c.Listen, c.Advertise = "a=127.0.0.1:0,b=:0", "localhost" },
		"the agent port listens on all addresses":  func(c *storagenode.Config) { c.AgentListen = "0.0.0.0:0" },
		"advertised host":                          func(c *storagenode.Config) { c.Advertise = "host:80" },
		"path is too long":                         func(c *storagenode.Config) { c.Socket = "/tmp/" + string(make([]byte, 200)) },
	} {
		cfg := b.config("")
		change(&cfg)
		_, err := storagenode.Start(t.Context(), cfg)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "\n", "one line")
	}
	require.Empty(t, b.registrations(), "refused before anybody was told")

	// Nobody answers: the error names the node and the controller.
	cfg := b.config("")
	cfg.Controllers = []string{"http://" + taken.Addr().String()}
	taken.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = storagenode.Start(ctx, cfg)
	require.ErrorContains(t, err, "storage node n1")
	require.ErrorContains(t, err, cfg.Controllers[0])
	require.NoFileExists(t, cfg.Socket)
}

// TestAddressesAreTold: a node is registered with every address of the tcp fabric and its rail, and serves at each. --advertise names its agent alone.
func TestAddressesAreTold(t *testing.T) {
	b := newBoss(t)
	cfg := b.config("")
	cfg.Listen, cfg.Advertise = "a=127.0.0.1:0,b-2=127.0.0.2:0,127.0.0.3:0", "localhost"
	n := b.start(cfg)
	node := b.registrations()[0].Node
	require.Contains(t, node.AgentUrl, "localhost")
	for i, rail := range []string{"a", "b-2", ""} {
		e := node.Endpoints[i]
		require.Equal(t, rail, e.Rail)
		require.Equal(t, quarrypb.Provider_PROVIDER_TCP, e.Provider)
		require.True(t, strings.HasPrefix(e.Address, fmt.Sprintf("127.0.0.%d:", i+1)), e.Address)
		require.Equal(t, e.Address, n.Stats().Rails[i].Address)
		c, err := net.Dial("tcp", e.Address)
		require.NoError(t, err)
		var challenge [host.ChallengeBytes]byte
		_, err = io.ReadFull(c, challenge[:])
		require.NoError(t, err, "it serves at %s", e.Address)
		c.Close()
	}
	require.Equal(t, node.Endpoints[0].Address, n.Stats().TCP)
	require.NoError(t, n.Close())
	for i := range 3 {
		_, err := net.Dial("tcp", node.Endpoints[i].Address)
		require.Error(t, err, "closed")
	}
}

func TestAdvertisedAddressIsTold(t *testing.T) {
	b := newBoss(t)
	cfg := b.config("")
	cfg.Listen, cfg.AgentListen, cfg.Advertise = "0.0.0.0:0", ":0", "localhost"
	n := b.start(cfg)
	name, port, err := net.SplitHostPort(n.Stats().TCP)
	require.NoError(t, err)
	require.Equal(t, "localhost", name)
	require.NotEqual(t, "0", port)
	require.Equal(t, n.Stats().TCP, b.registrations()[0].Node.Endpoints[0].Address)
	b.hostAndOpen(n, 1, 1)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	require.NoError(t, err)
	require.Contains(t, string(boot), b.registrations()[0].Node.Endpoints[1].HostId)
	require.True(t, filepath.IsAbs(b.registrations()[0].Node.Endpoints[1].Address))
}
