package redis_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// patience bounds every wait of a test.
const patience = 3 * time.Minute

// newTree is an empty tree on a cluster of its own.
func newTree(t testing.TB, o testcluster.Options) (*testcluster.Cluster, *kv.Tree) {
	cluster := testcluster.New(t, o)
	tree, err := kv.Create(t.Context(), cluster.Connect(client.Config{}), "keys", btree.Config{})
	require.NoError(t, err)
	return cluster, tree
}

// openTree opens the tree by another client.
func openTree(t testing.TB, cluster *testcluster.Cluster) *kv.Tree {
	tree, err := kv.Open(t.Context(), cluster.Connect(client.Config{}), "keys", btree.Config{})
	require.NoError(t, err)
	return tree
}

// serve starts a gateway that ends with the test.
func serve(t testing.TB, s *redis.Server) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Error("the gateway does not end")
		}
	})
	return l.Addr().String()
}

// gateway is a gateway over a tree of its own.
func gateway(t testing.TB, cfg redis.Config) string {
	if cfg.Tree == nil {
		_, cfg.Tree = newTree(t, testcluster.Options{})
	}
	return serve(t, redis.New(cfg))
}

// realRedis starts a redis-server, or skips the test.
func realRedis(t testing.TB) string {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		t.Skip("redis-server is not installed: apt-get install redis-server")
	}
	socket := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command(path, "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", t.TempDir())
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	require.Eventually(t, func() bool {
		c, err := net.Dial("unix", socket)
		if err == nil {
			c.Close()
		}
		return err == nil
	}, patience, 10*time.Millisecond)
	return "unix:" + socket
}

// peer is a raw connection.
type peer struct {
	t testing.TB
	net.Conn
	r *bufio.Reader
}

func dial(t testing.TB, addr string) *peer {
	network := "tcp"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", path
	}
	c, err := net.Dial(network, addr)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(2*patience)))
	return &peer{t, c, bufio.NewReader(c)}
}

// frame is a command as clients send it.
func frame(args ...string) []byte {
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	return b
}

func (p *peer) send(b []byte) {
	p.t.Helper()
	_, err := p.Write(b)
	require.NoError(p.t, err)
}

// do sends a command of words and returns its answer.
func (p *peer) do(args ...string) string {
	p.t.Helper()
	p.send(frame(args...))
	return p.reply().String()
}

// cmd sends a command written in one line.
func (p *peer) cmd(line string) string {
	p.t.Helper()
	return p.do(strings.Fields(line)...)
}

func (p *peer) reply() value {
	p.t.Helper()
	v, err := readValue(p.r)
	require.NoError(p.t, err)
	return v
}

// gone waits for the other side to close the connection.
func (p *peer) gone() {
	p.t.Helper()
	_, err := io.Copy(io.Discard, p.r)
	if err != nil {
		require.ErrorContains(p.t, err, "reset")
	}
}

// value is an answer.
type value struct {
	kind byte
	text string
	list []value
}

func readValue(r *bufio.Reader) (v value, err error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return v, err
	}
	if len(line) < 3 || !strings.HasSuffix(line, "\r\n") {
		return v, fmt.Errorf("answer line %q", line)
	}
	v.kind, v.text = line[0], line[1:len(line)-2]
	switch v.kind {
	case '+', '-', ':', ',', '_', '#':
		return v, nil
	case '$', '=':
		n, err := strconv.Atoi(v.text)
		if err != nil || n < 0 {
			return v, err
		}
		b := make([]byte, n+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return v, err
		}
		v.text = string(b[:n])
		return v, nil
	case '*', '~', '%', '>':
		n, err := strconv.Atoi(v.text)
		if err != nil || n < 0 {
			return v, err
		}
		if v.kind == '%' {
			n *= 2
		}
		for range n {
			e, err := readValue(r)
			if err != nil {
				return v, err
			}
			v.list = append(v.list, e)
		}
		return v, nil
	}
	return v, fmt.Errorf("answer line %q", line)
}

// String keeps all that differs between answers.
func (v value) String() string {
	switch v.kind {
	case '*', '~', '%', '>':
		if v.text == "-1" {
			return "*-1"
		}
		var b bytes.Buffer
		b.WriteByte(v.kind)
		b.WriteByte('[')
		for i, e := range v.list {
			if i > 0 {
				b.WriteByte(' ')
			}
			b.WriteString(e.String())
		}
		b.WriteByte(']')
		return b.String()
	case '$':
		return strconv.Quote(v.text)
	}
	return string(v.kind) + v.text
}

// sorted sorts an answer's elements, in groups of so many.
func (v value) sorted(group int) value {
	if v.kind == '%' {
		group = 2
	}
	if len(v.list)%group != 0 {
		return v
	}
	chunks := slices.Collect(slices.Chunk(v.list, group))
	slices.SortFunc(chunks, func(a, b []value) int {
		return strings.Compare(value{kind: '*', list: a}.String(), value{kind: '*', list: b}.String())
	})
	v.list = slices.Concat(chunks...)
	return v
}
