package space_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// slowPath passes the bytes of clients on to a node. It can keep those of its present connections, also when their clients have closed them, as the buffers of a
// network do.
type slowPath struct {
	node string

	mu      sync.Mutex
	keeps   bool // what comes by present connections; other ones are refused
	conns   []*slowConn
	arrived chan struct{} // closed when so many bytes are kept
	want    int
}

type slowConn struct {
	keeps bool
	kept  bytes.Buffer
	from  net.Conn
	to    net.Conn
	ended chan struct{} // closed when the node has closed it
}

func (p *slowPath) serve(l net.Listener) {
	for {
		from, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refused := p.keeps
		p.mu.Unlock()
		to, err := net.Dial("tcp", p.node)
		if refused || err != nil {
			from.Close()
			continue
		}
		c := &slowConn{from: from, to: to, ended: make(chan struct{})}
		p.mu.Lock()
		p.conns = append(p.conns, c)
		p.mu.Unlock()
		go func() { _, _ = io.Copy(from, to); from.Close(); close(c.ended) }()
		go p.pass(from, c)
	}
}

// pass passes what a client sends.
func (p *slowPath) pass(from net.Conn, c *slowConn) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		p.mu.Lock()
		if c.keeps {
			c.kept.Write(b[:n])
			if p.want -= n; p.want <= 0 && p.want+n > 0 {
				close(p.arrived)
			}
		} else {
			_, _ = c.to.Write(b[:n])
			if err != nil {
				c.to.Close()
			}
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// keep keeps what comes by the present connections, and refuses others. The channel is closed when n bytes have come.
func (p *slowPath) keep(n int) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keeps, p.want, p.arrived = true, n, make(chan struct{})
	for _, c := range p.conns {
		c.keeps = true
	}
	return p.arrived
}

// cut ends the connections whose bytes are kept, as their clients see it.
func (p *slowPath) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if c.keeps {
			c.from.Close()
		}
	}
}

// admit passes connections again.
func (p *slowPath) admit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.keeps = false
}

// release passes on what was kept, and returns when the node has seen the end of it.
func (p *slowPath) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		if c.keeps {
			_, _ = c.to.Write(c.kept.Bytes())
			_ = c.to.(*net.TCPConn).CloseWrite()
			<-c.ended
		}
	}
}

// TestHazard308_WriteOfASessionThatHasEnded: the answer to a Write does not come, its session ends, and its bytes are on their way. The next Write of the client, under
// its next session, is acknowledged when the bytes of the first one cannot arrive any more.
func TestHazard308_WriteOfASessionThatHasEnded(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: testcluster.NoNodes})
	l, err := net.Listen("tcp", "127.0.0.2:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	cfg := c.NodeConfig(0)
	cfg.Listen, cfg.AgentListen, cfg.Advertise = "127.0.0.1:"+port, "0.0.0.0:0", "127.0.0.2"
	path := &slowPath{node: cfg.Listen}
	go path.serve(l)
	node, err := storagenode.Start(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { node.Close() })

	line := c.Line()
	cl, err := client.Connect(ctx, client.Config{Controllers: []string{line.URL}, Transport: client.TransportTCP, Replicas: 1, Lanes: 1, Timeout: 3 * time.Minute})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cl.Close()) })
	s, err := space.Create(ctx, cl, "s", mib, space.Options{RegionBytes: mib})
	require.NoError(t, err)
	first, second := []byte(strings.Repeat("first ", 10000)), []byte(strings.Repeat("second", 10000))
	_, err = s.Write(ctx, make([]byte, len(first)), s.Base())
	require.NoError(t, err)

	_, revoke := line.Late("RevokeSession")
	asked := make(chan struct{})
	var once sync.Once
	line.Lose(func(method string) bool {
		if method == "CertifyFence" {
			once.Do(func() { close(asked) })
		}
		return false
	})
	kept := path.keep(len(first))
	short, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { _, err := s.Write(short, first, s.Base()); done <- err }()
	<-kept
	cancel()
	path.cut()
	require.ErrorIs(t, <-done, client.ErrUnknown)
	path.admit()
	go func() { _, err := s.Write(ctx, second, s.Base()); done <- err }()
	select {
	case err = <-done:
	case <-asked:
		revoke()
		err = <-done
	}
	require.NoError(t, err)
	path.release()
	got := make([]byte, len(second))
	_, err = s.Read(ctx, got, s.Base())
	require.NoError(t, err)
	require.Equal(t, string(second[:12]), string(got[:12]))
	require.Equal(t, second, got)
}
