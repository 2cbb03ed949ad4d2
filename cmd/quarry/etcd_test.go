package main

import (
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
)

// An etcd of the operator's that wants certificates: a controller has flags for them.
func TestExternalEtcdWithTLS(t *testing.T) {
	ca, caPEM, _, err := identity.NewAuthority("etcd", time.Hour)
	require.NoError(t, err)
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, b, 0o600))
		return p
	}
	issue := func(role identity.Role, name string) (string, string) {
		cert, key, err := ca.Issue(role, name, []string{"127.0.0.1"}, time.Hour)
		require.NoError(t, err)
		return write(name+".crt", cert), write(name+".key", key)
	}
	caFile := write("ca.crt", caPEM)
	cert, key := issue(identity.Controller, "etcd")
	e := embed.NewConfig()
	e.Dir, e.LogLevel, e.UnsafeNoFsync = filepath.Join(dir, "etcd"), "panic", true
	e.ClientTLSInfo = transport.TLSInfo{CertFile: cert, KeyFile: key, TrustedCAFile: caFile, ClientCertAuth: true}
	e.ListenClientUrls = []url.URL{{Scheme: "https", Host: "127.0.0.1:0"}}
	e.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	e.AdvertiseClientUrls, e.AdvertisePeerUrls = e.ListenClientUrls, e.ListenPeerUrls
	e.InitialCluster = e.InitialClusterFromName(e.Name)
	srv, err := embed.StartEtcd(e)
	require.NoError(t, err)
	defer srv.Close()
	<-srv.Server.ReadyNotify()
	at := "https://" + srv.Clients[0].Addr().String()

	serve := []string{"controller", "--listen", "127.0.0.1:0", "--gossip-listen", "none", "--etcd", at}
	quarry(t, nil, "", append(serve, "--etcd-ca", caFile)...).fails(t, exitUnreachable, at)
	quarry(t, nil, "", append(serve, "--etcd-key", key)...).fails(t, exitUsage, "--etcd")
	quarry(t, nil, "", append(serve[:len(serve)-1:len(serve)-1], "http://127.0.0.1:1", "--etcd-ca", caFile)...).fails(t, exitUsage, "https://")
	quarry(t, nil, "", "controller", "--etcd-ca", caFile).fails(t, exitUsage, "--etcd-ca")
	cert, key = issue(identity.Client, "quarry")
	p, err := local.Spawn(t.Context(), executable(t), append(serve, "--etcd-ca", caFile, "--etcd-cert", cert, "--etcd-key", key)...)
	require.NoError(t, err)
	defer p.Stop()
	quarry(t, []string{"QUARRY_CONTROLLER=" + p.Ready["url"]}, "", "status").ok(t)
}
