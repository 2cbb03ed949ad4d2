//go:build cgo && verbs

package verbs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// introduce does what a client does on the socket, and no more.
func introduce(t *testing.T, addr string, tk *rdma.Credentials, number uint32) (*net.TCPConn, endpoint) {
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	_, err = nc.Write(append(appendIntro(nil), rdmatest.Hello(t, nc, tk, number)...))
	require.NoError(t, err)
	var b [host.WelcomeBytes + endpointBytes]byte
	nc.SetReadDeadline(time.Now().Add(guard))
	_, err = io.ReadFull(nc, b[:])
	require.NoError(t, err)
	e, err := decodeEndpoint(b[host.WelcomeBytes:])
	require.NoError(t, err)
	return nc.(*net.TCPConn), e
}

// Private data that is garbage, or names a lane that nobody was told about, gets nobody in;
// the lane it was meant for, if there is one, ends.
func TestPrivateData(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	d := newDialer(t)
	listener := Live()
	for name, test := range map[string]func(c claim) []byte{
		"zeros":        func(claim) []byte { return make([]byte, 56) },
		"short":        func(c claim) []byte { return c.append(nil)[:8] },
		"text":         func(claim) []byte { return bytes.Repeat([]byte("GET /"), 11) },
		"version":      func(c claim) []byte { b := c.append(nil); b[4] = 99; return b },
		"length":       func(c claim) []byte { b := c.append(nil); b[6]++; return b },
		"wrong nonce":  func(c claim) []byte { c.nonce[15] ^= 1; return c.append(nil) },
		"no nonce":     func(c claim) []byte { c.nonce = [16]byte{}; return c.append(nil) },
		"another lane": func(c claim) []byte { c.lane++; return c.append(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			nc, to := introduce(t, n.addr, ticket(7, 0, rdma.ReadWrite), 3)
			l, err := d.openLane(leastDepth)
			require.NoError(t, err)
			require.NoError(t, watch(l, nc))
			before := n.strays.Load()
			err = d.device.join(l, to, test(claim{lane: 3, nonce: to.nonce}), guard)
			require.Error(t, err)
			if err != errHeard { // the socket may be quicker
				require.ErrorContains(t, err, "refuses the queue pair")
			}
			require.Equal(t, before+1, n.strays.Load())
			require.NoError(t, closeLane(l))
			nc.Close()
			require.Eventually(t, func() bool {
				now := Live()
				now.ProtectionDomains, now.MemoryRegions = listener.ProtectionDomains, listener.MemoryRegions // the tenant's stay
				return now == listener
			}, guard, time.Millisecond)
		})
	}
	_, to := open(t, d, n.addr, ticket(7, 0, rdma.ReadWrite), 3)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
}

// What was said on a socket lets one queue pair in, and no second.
func TestNonceIsGoodForOne(t *testing.T) {
	n := startNode(t, testCluster)
	d := newDialer(t)
	nc, to := introduce(t, n.addr, ticket(7, 0, rdma.ReadWrite), 3)
	private := (&claim{lane: 3, nonce: to.nonce}).append(nil)
	first, err := d.openLane(leastDepth)
	require.NoError(t, err)
	require.NoError(t, watch(first, nc))
	require.NoError(t, d.device.join(first, to, private, guard))
	second, err := d.openLane(leastDepth)
	require.NoError(t, err)
	require.NoError(t, watch(second, nc))
	require.ErrorContains(t, d.device.join(second, to, private, guard), "refuses the queue pair")
	require.NoError(t, closeLane(second))
	require.NoError(t, closeLane(first))
}

// Who is welcome and never connects loses its queue pair at the node, whether it hangs up
// or not.
func TestWelcomeAndNeverConnected(t *testing.T) {
	n := startNode(t, testCluster)
	alone := Live()
	nc, _ := introduce(t, n.addr, ticket(7, 0, rdma.ReadWrite), 0)
	require.Equal(t, int64(1), Live().QueuePairs)
	nc.Close()
	require.Eventually(t, func() bool { return Live().QueuePairs == 0 }, guard, time.Millisecond)
	n.patience = 50 * time.Millisecond
	introduce(t, n.addr, ticket(7, 0, rdma.ReadWrite), 0)
	require.Eventually(t, func() bool { return Live().QueuePairs == 0 }, guard, time.Millisecond)
	alone.ProtectionDomains = Live().ProtectionDomains // the tenant's stays
	require.Equal(t, alone, Live())
}

// A node that dies, or is of another version, or cannot be reached by RDMA, in each phase.
func TestNodeDiesInHandshake(t *testing.T) {
	d := newDialer(t)
	// Takes requests to connect and never answers.
	silent := &Server{device: d.device}
	require.NoError(t, silent.listen())
	defer func() { require.NoError(t, silent.deafen()) }()
	deaf := &Server{device: d.device}
	require.NoError(t, deaf.listen())
	gone := deaf.port
	require.NoError(t, deaf.deafen())

	welcome := (&host.Welcome{Node: 1, Incarnation: 1}).Append(nil)
	self := d.device.caps.GID.As16()
	endpointOf := func(e endpoint) []byte { return e.append(bytes.Clone(welcome)) }
	good := endpointOf(endpoint{port: silent.port, addr: self, nonce: [16]byte{1}})
	spoil := func(at int, b byte) []byte { c := bytes.Clone(good); c[at] = b; return c }
	ip := func(s string) [16]byte { return [16]byte(net.ParseIP(s).To16()) }
	before := Live()
	for name, test := range map[string]struct {
		answer []byte
		stays  bool // does not hang up
		limit  time.Duration
		want   string
	}{
		"at once":                    {nil, false, guard, "no challenge"},
		"half a welcome":             {good[:20], false, guard, "no welcome"},
		"no endpoint":                {welcome, false, guard, "no welcome"},
		"version":                    {spoil(8, 99), false, guard, ""},
		"endpoint version":           {spoil(host.WelcomeBytes+4, 9), false, guard, "version 9"},
		"endpoint":                   {spoil(host.WelcomeBytes, 0), false, guard, "does not speak"},
		"no port":                    {endpointOf(endpoint{addr: self, nonce: [16]byte{1}}), false, guard, "out of range"},
		"welcomed, then gone":        {good, false, guard, "EOF"},
		"welcomed, then silent":      {good, true, 300 * time.Millisecond, "deadline"},
		"nobody listens":             {endpointOf(endpoint{port: gone, addr: self, nonce: [16]byte{1}}), true, 60 * time.Second, "no process listens"},
		"no route":                   {endpointOf(endpoint{port: 1, addr: ip("192.0.2.1"), nonce: [16]byte{1}}), true, 60 * time.Second, "no way to the address"},
		"nobody has the address":     {endpointOf(endpoint{port: 1, addr: ip("10.9.0.99"), nonce: [16]byte{1}}), true, 500 * time.Millisecond, ""},
		"address of another kind":    {endpointOf(endpoint{port: 1, addr: ip("fd09::1"), nonce: [16]byte{1}}), true, 60 * time.Second, "addresses of one kind"},
		"address of another machine": {endpointOf(endpoint{port: 1, addr: ip("127.0.0.1"), nonce: [16]byte{1}}), true, 500 * time.Millisecond, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			go func() {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				if test.answer != nil {
					nc.Write((&host.Challenge{Node: 1, Incarnation: 1, Nonce: [32]byte{1}}).Append(nil))
					io.ReadFull(nc, make([]byte, introBytes+host.HelloBytes))
					nc.Write(test.answer)
				}
				if test.stays {
					io.Copy(io.Discard, nc)
				}
				nc.Close()
			}()
			ctx, cancel := context.WithTimeout(t.Context(), test.limit)
			defer cancel()
			_, err = d.Dial(ctx, l.Addr().String(), ticket(1, 0, rdma.ReadWrite), 0)
			require.ErrorIs(t, err, rdma.ErrBroken)
			require.ErrorContains(t, err, test.want)
			require.Equal(t, before, Live(), "left behind")
		})
	}
}

// TestClientProcess is no test: it is the client that other tests kill.
func TestClientProcess(t *testing.T) {
	addr := os.Getenv("VERBS_NODE")
	if addr == "" {
		t.Skip("started by other tests")
	}
	d := newDialer(t)
	for i := range uint32(3) {
		_, to := open(t, d, addr, ticket(5, 0, rdma.ReadWrite), i)
		require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	}
	os.Stdout.WriteString("connected\n")
	io.Copy(io.Discard, os.Stdin)
}

// A client with several lanes that is killed leaves nothing at the node.
func TestClientKilled(t *testing.T) {
	n := startNode(t, testCluster)
	require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
	cmd := exec.Command(os.Args[0], "-test.run=^TestClientProcess$")
	cmd.Env = append(os.Environ(), "VERBS_NODE="+n.addr)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var b [10]byte
	_, err = io.ReadFull(out, b[:])
	require.NoError(t, err)
	require.Equal(t, "connected\n", string(b[:]))
	require.Equal(t, int64(3), Live().QueuePairs)
	require.Equal(t, int64(4), Live().ConnectionIDs)
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	require.Eventually(t, func() bool { return Live().QueuePairs == 0 && Live().ConnectionIDs == 1 }, guard, time.Millisecond)
	require.Equal(t, byte(3), n.Bytes(1)[0])
}

// Where the socket stays open, behind something that relays it, the connection manager
// says that a node is dead.
func TestDisconnected(t *testing.T) {
	cmd, addr := startPeer(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	done := make(chan struct{})
	defer close(done)
	go func() {
		from, err := l.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", addr)
		if err != nil {
			return
		}
		go io.Copy(to, from)
		io.Copy(from, to)
		<-done // does not pass on that the node has hung up
		from.Close()
		to.Close()
	}()
	d := newDialer(t)
	c, to := open(t, d, l.Addr().String(), ticket(1, 0, rdma.ReadWrite), 0)
	require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	require.Eventually(t, func() bool {
		return chain(to, guard, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err != nil
	}, guard, time.Millisecond)
	require.ErrorIs(t, c.dead, errDisconnected)
}

// A ticket lets its holder ask for a window only once its queue pair is connected: a bind
// on one that is not completes never, and would hold the region's lock for as long.
func TestOpenBeforeJoin(t *testing.T) {
	for name, w := range map[string]Windows{"windows": WindowsOn, "memory regions": WindowsOff} {
		t.Run(name, func(t *testing.T) {
			n := startNodeWith(t, testCluster, w)
			require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
			nc, _ := introduce(t, n.addr, ticket(7, 0, rdma.ReadWrite), 0)
			_, err := nc.Write((&request{kind: kindOpen, tag: 1, region: 1, epoch: 1}).append(nil))
			require.NoError(t, err)
			var b [answerBytes]byte
			_, err = io.ReadFull(nc, b[:])
			require.NoError(t, err)
			require.EqualValues(t, kindFarewell, decodeAnswer(b[:]).kind, "its lane ends")
			require.NoError(t, rotate(t, n, 1))
			require.Eventually(t, func() bool { return Live().QueuePairs == 0 }, guard, time.Millisecond)
			require.Zero(t, Live().Windows)
		})
	}
}

// rotate closes a region and opens it again, in bounded time.
func rotate(t *testing.T, n *node, epoch uint64) error {
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), guard)
		defer cancel()
		err := n.CloseRegion(ctx, 1, epoch)
		if err == nil {
			err = n.OpenRegion(ctx, 1, epoch+1)
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(guard):
		return errors.New("closing and opening the region hangs")
	}
}
