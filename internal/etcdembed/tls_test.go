package etcdembed

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/preauth"
	"github.com/quarrystore/quarry/verify/certs"
)

// threeSecure starts three members with https in their peer URLs, and has them take a write.
func threeSecure(t *testing.T, trust func(name string, c *Config)) (urls []string, srvs []*Server) {
	urls = freePeers(t, 3)
	for i := range urls {
		urls[i] = strings.Replace(urls[i], "http:", "https:", 1)
	}
	all := fmt.Sprintf("m0=%s,m1=%s,m2=%s", urls[0], urls[1], urls[2])
	var starts []<-chan result
	for i := range 3 {
		c := Config{Dir: t.TempDir(), Name: fmt.Sprintf("m%d", i), PeerURL: urls[i], InitialCluster: all}
		trust(c.Name, &c)
		starts = append(starts, member(t, t.Context(), c))
	}
	for _, s := range starts {
		r := <-s
		require.NoError(t, r.err)
		srvs = append(srvs, r.srv)
	}
	cli, err := srvs[0].Client()
	require.NoError(t, err)
	defer cli.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = cli.Put(ctx, "key", "kept")
	require.NoError(t, err)
	return urls, srvs
}

// TestPeersAreControllers: a process without a controller's certificate sends no raft message, reads no log and learns no member.
func TestPeersAreControllers(t *testing.T) {
	issue, foreign := certs.New(t, "prod").Source, certs.New(t, "prod").Source
	urls, srvs := threeSecure(t, func(name string, c *Config) { c.TLS = issue(identity.Controller, name) })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	// What a leader of a later term would send: a member that took it would forget its leader.
	to, from, term := srvs[1].ID(), srvs[0].ID(), srvs[1].etcd.Server.Term()+1000
	forged, err := proto.Marshal(&raftpb.Message{Type: raftpb.MsgHeartbeat.Enum(), To: &to, From: &from, Term: &term})
	require.NoError(t, err)
	send := func(c *tls.Config, method, path string, body []byte) (int, string, error) {
		r, err := http.NewRequestWithContext(ctx, method, urls[1]+path, bytes.NewReader(body))
		require.NoError(t, err)
		r.Header.Set("X-Etcd-Cluster-Id", srvs[1].etcd.Server.Cluster().ID().String())
		r.Header.Set("X-Server-Version", "3.6.0")
		r.Header.Set("X-Server-From", srvs[0].etcd.Server.MemberID().String())
		tr := &http.Transport{TLSClientConfig: c, DisableKeepAlives: true}
		defer tr.CloseIdleConnections()
		res, err := (&http.Client{Transport: tr}).Do(r)
		if err != nil {
			return 0, "", err
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(res.Body, 1<<16))
		return res.StatusCode, string(b), nil
	}
	for who, c := range map[string]*tls.Config{
		"without a certificate": {InsecureSkipVerify: true},
		"a node":                blind(issue(identity.Node, "n1")),
		"a client":              blind(issue(identity.Client, "c")),
		"an operator":           blind(issue(identity.Operator, "o")),
		"another authority":     blind(foreign(identity.Controller, "m0")),
	} {
		for _, path := range []string{"/raft", "/raft/stream/msgapp/" + fmt.Sprintf("%x", to), "/members", "/version"} {
			_, body, err := send(c, http.MethodGet, path, nil)
			require.Error(t, err, "%s: %s: %s", who, path, body)
		}
		_, body, err := send(c, http.MethodPost, "/raft", forged)
		require.Error(t, err, "%s: %s", who, body)
	}
	require.Less(t, srvs[1].etcd.Server.Term(), term, "no forged message was taken")
	if plain, err := http.Get(strings.Replace(urls[1], "https:", "http:", 1) + "/members"); err == nil {
		plain.Body.Close()
		require.Equal(t, http.StatusBadRequest, plain.StatusCode, "without TLS")
	}

	// The same message from a controller reaches raft: the port was asked the right thing.
	status, body, err := send(blind(issue(identity.Controller, "m0")), http.MethodGet, "/members", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status, body)
	require.Contains(t, body, urls[2])
	status, body, err = send(blind(issue(identity.Controller, "m0")), http.MethodPost, "/raft", forged)
	require.NoError(t, err)
	require.Equal(t, http.StatusNoContent, status, body)
	require.Eventually(t, func() bool { return srvs[1].etcd.Server.Term() >= term }, patience, readAgain)
}

// blind shows a certificate to any server.
func blind(src *identity.Source) *tls.Config {
	c := src.Client(identity.Controller)
	c.VerifyConnection = nil
	return c
}

// TestPeersOfOneToken: without certificates of an authority, members with https in their peer URLs
// take calls only from holders of the same token.
func TestPeersOfOneToken(t *testing.T) {
	urls, _ := threeSecure(t, func(_ string, c *Config) { c.Token = "one" })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	members := func(token string) error {
		src, err := identity.FromToken(token, t.TempDir(), "m9", slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		tr := &http.Transport{TLSClientConfig: blind(src), DisableKeepAlives: true}
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, urls[1]+"/members", nil)
		require.NoError(t, err)
		res, err := (&http.Client{Transport: tr}).Do(r)
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	require.NoError(t, members("one"))
	require.Error(t, members("another"))
}

func TestPeersWithTLSNeedAControllersCertificate(t *testing.T) {
	url := strings.Replace(freePeers(t, 1)[0], "http:", "https:", 1)
	for _, src := range []*identity.Source{nil, certs.New(t, "prod").Source(identity.Node, "n1")} {
		_, err := Start(t.Context(), Config{Name: "m1", PeerURL: url, NoSync: true, TLS: src, Log: slog.New(slog.DiscardHandler)})
		require.ErrorContains(t, err, "quarry cert controller")
	}
}

// TestStrangersAtThePeerPort: callers without authentication have few places there, before the first start too.
func TestStrangersAtThePeerPort(t *testing.T) {
	issue := certs.New(t, "prod").Source
	urls := freePeers(t, 2)
	for i := range urls {
		urls[i] = strings.Replace(urls[i], "http:", "https:", 1)
	}
	at := func(i int) Config {
		name := fmt.Sprintf("m%d", i)
		return Config{Dir: t.TempDir(), Name: name, PeerURL: urls[i], InitialCluster: fmt.Sprintf("m0=%s,m1=%s", urls[0], urls[1]), TLS: issue(identity.Controller, name)}
	}
	address := strings.TrimPrefix(urls[0], "https://")
	crowd := func() {
		for i := range 3 * preauth.MaxHandshakes {
			c, err := net.Dial("tcp", address)
			require.NoError(t, err)
			defer c.Close()
			if i == 0 {
				defer func() { // one for which there is no place any more
					require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
					_, err := c.Read(make([]byte, 1))
					require.Error(t, err)
					require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
				}()
			}
		}
		require.Eventually(t, func() bool { // a controller has one
			tr := &http.Transport{TLSClientConfig: issue(identity.Controller, "m1").Client(identity.Controller), DisableKeepAlives: true}
			res, err := (&http.Client{Transport: tr, Timeout: patience}).Get(urls[0] + "/version")
			if err == nil {
				res.Body.Close()
			}
			return err == nil
		}, patience, readAgain)
	}
	waits := make(chan []string, 1000)
	c := at(0)
	c.Waiting = func(silent []string) { waits <- silent }
	first := member(t, t.Context(), c)
	<-waits
	before := closedStrangers()
	crowd()
	require.Greater(t, closedStrangers(), before, "before the first start")
	second := member(t, t.Context(), at(1))
	for _, m := range []<-chan result{first, second} {
		r := <-m
		require.NoError(t, r.err)
	}
	before = closedStrangers()
	crowd()
	require.Greater(t, closedStrangers(), before, "of a member that runs")
}

// closedStrangers counts connections that were closed for newer ones.
func closedStrangers() (n uint64) {
	for _, p := range httpserver.Ports() {
		p.Refused(func(r httpserver.Reason, of uint64) {
			if p.Name == "etcd" && r == httpserver.PreAuth {
				n = of
			}
		})
	}
	return n
}

// TestMemberFarBehind: a member that was away gets a snapshot, many times what callers without authentication may send.
func TestMemberFarBehind(t *testing.T) {
	const snapshotEvery, entries, writers = 1000, 1800, 30 // the log keeps fewer entries
	issue := certs.New(t, "prod").Source
	var last Config
	_, srvs := threeSecure(t, func(name string, c *Config) {
		c.snapshotEvery = snapshotEvery
		c.TLS, last = issue(identity.Controller, name), *c
	})
	last.TLS = issue(identity.Controller, last.Name)
	srvs[2].Close()
	cli, err := srvs[0].Client()
	require.NoError(t, err)
	defer cli.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	value := strings.Repeat("x", 10<<10)
	put := func(key string) bool { // a starved machine changes leaders
		_, err := cli.Put(ctx, key, value)
		return err == nil
	}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range entries / writers {
				for key := fmt.Sprintf("%d-%d", w, i); !put(key) && ctx.Err() == nil; {
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, ctx.Err())
	r := <-member(t, t.Context(), last)
	require.NoError(t, r.err)
	behind, err := r.srv.Client()
	require.NoError(t, err)
	defer behind.Close()
	require.Eventually(t, func() bool {
		got, err := behind.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithCountOnly(), clientv3.WithSerializable())
		return err == nil && got.Count > entries
	}, patience, readAgain)
	snapshots, err := filepath.Glob(filepath.Join(last.Dir, "member", "snap", "*.snap"))
	require.NoError(t, err)
	var term, index uint64
	_, err = fmt.Sscanf(filepath.Base(slices.Max(snapshots)), "%x-%x.snap", &term, &index)
	require.NoError(t, err)
	require.Greater(t, index, uint64(entries*3/4), "a snapshot of the leader's, not one that the member made of the log: %v", snapshots)
}
