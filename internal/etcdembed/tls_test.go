package etcdembed

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/identity"
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
