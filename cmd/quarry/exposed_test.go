package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/userdir"
)

// Ports that other hosts reach want certificates, a token or a password, or --insecure.
func TestExposedPortsAreRefused(t *testing.T) {
	for _, args := range [][]string{
		{"controller", "--listen", "0.0.0.0:0"},
		{"controller", "--listen", ":0"},
		{"controller", "--listen", "[::]:0"},
		{"controller", "--listen", "some.host:0"},
		{"storage", "--listen", "0.0.0.0:0"},
		{"storage", "--agent", "0.0.0.0:0"},
		{"dev", "--listen", "0.0.0.0:0"},
	} {
		quarry(t, nil, "", args...).fails(t, exitUsage, args[2], "--token", "127.0.0.1", "--insecure")
	}
	// A token says nothing to those who reach the port of the embedded etcd.
	for _, peer := range []string{"http://10.0.0.1:7424", "http://c1:7424"} {
		quarry(t, nil, "", "controller", "--token", "secret", "--name", "c1", "--listen", "127.0.0.1:0", "--data", t.TempDir(), "--etcd-peer", peer, "--initial-cluster", "c1="+peer).
			fails(t, exitUsage, strings.TrimPrefix(peer, "http://"), "https://", "--insecure")
	}
	quarry(t, nil, "", "gateway", "redis", "--tree", "x", "--listen", ":0").fails(t, exitUsage, "--password-file", "--insecure")
}

func TestInsecureIsTold(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	serve := func(args ...string) string {
		p, err := local.Run(t.Context(), local.Command{Name: "c", Path: executable(t), Log: log,
			Args: append([]string{"controller", "--listen", "0.0.0.0:0", "--advertise", "http://127.0.0.1:1", "--gossip-listen", "none", "--json"}, args...)})
		require.NoError(t, err)
		t.Cleanup(func() { p.Stop() })
		return p.Ready["url"]
	}
	_ = serve("--token", "secret")
	b, err := os.ReadFile(log)
	require.NoError(t, err)
	require.NotContains(t, string(b), "insecure", "a token protects it")
	_ = serve("--insecure")
	b, err = os.ReadFile(log)
	require.NoError(t, err)
	require.Contains(t, string(b), "insecure: any caller")
}

// TestDevIsForItsUserAlone: without --token, quarry dev takes calls of those who can read its file.
func TestDevIsForItsUserAlone(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "127.0.0.2:0"} {
		t.Run(address, func(t *testing.T) { devIsForItsUserAlone(t, address) })
	}
}

func devIsForItsUserAlone(t *testing.T, address string) {
	t.Setenv("TMPDIR", t.TempDir())
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--nodes", "1", "--listen", address)
	require.NoError(t, err)
	url, file := p.Ready["url"], p.Ready["token_file"]
	st, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())
	ask := func(token string) int {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/quarry.v1.Controller/Status", strings.NewReader("{}"))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Quarry-Token", token)
		res, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		res.Body.Close()
		return res.StatusCode
	}
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, ask(""))
	require.Equal(t, http.StatusOK, ask(strings.TrimSpace(string(b))))

	// This user's commands and programs find it; in another folder for temporary files they are like another user's.
	mine := []string{"QUARRY_CONTROLLER=" + url}
	quarry(t, mine, "", "slab", "alloc", "--data", "hello").ok(t)
	quarry(t, append(mine, "TMPDIR="+t.TempDir()), "", "status").fails(t, exitFailed, "token")
	authority, err := os.ReadFile(strings.TrimSuffix(file, ".token") + ".crt")
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(authority))
	verified := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	res, err := verified.Get(strings.Replace(url, "http:", "https:", 1) + "/healthz")
	require.NoError(t, err)
	res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)
	verified.CloseIdleConnections()
	c, err := client.Connect(t.Context(), client.Config{Controllers: []string{url}})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, p.Stop())
	require.NoFileExists(t, file)
}

// TestCallsOfDevGoOverTLS: each program that calls a controller finds the authority of this user's quarry dev. The
// server here takes TLS alone.
func TestCallsOfDevGoOverTLS(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	a, ca, _, err := identity.NewAuthority("dev", time.Hour)
	require.NoError(t, err)
	conf, err := a.Serve(identity.Controller, "dev", []string{"127.0.0.1"}, time.Hour)
	require.NoError(t, err)
	calls := make(chan string, 1)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case calls <- r.URL.Path:
		default:
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	s.TLS = conf
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	at := s.Listener.Addr().String()
	kept, err := userdir.Keep(at, "", ca)
	require.NoError(t, err)
	defer kept.Close()
	url := "http://" + at
	command := func(args ...string) func(context.Context) {
		return func(ctx context.Context) {
			cmd := exec.CommandContext(ctx, executable(t), append(args, "--controller", url)...)
			_ = cmd.Run()
		}
	}
	for name, call := range map[string]func(context.Context){
		"SDK": func(ctx context.Context) {
			c, err := client.Connect(ctx, client.Config{Controllers: []string{url}})
			if err == nil {
				_ = c.Close()
			}
		},
		"status":  command("status"),
		"doctor":  command("doctor"),
		"fsck":    command("fsck"),
		"storage": command("storage", "--name", "n", "--listen", "127.0.0.1:0"),
		"support": command("support", "collect", "--out", filepath.Join(t.TempDir(), "a.tar.gz")),
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				call(ctx)
			}()
			select {
			case path := <-calls:
				require.Contains(t, path, "/")
			case <-ended:
				t.Error("no call over TLS")
			}
			cancel()
			<-ended
			for len(calls) > 0 {
				<-calls
			}
		})
	}
}

func TestStatusTellsInsecure(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, l, err := net.SplitHostPort(free.Addr().String())
	require.NoError(t, err)
	require.NoError(t, free.Close())
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--nodes", "1", "--insecure", "--listen", "0.0.0.0:"+l)
	require.NoError(t, err)
	defer p.Stop()
	env := []string{"QUARRY_CONTROLLER=http://127.0.0.1:" + l}
	require.Contains(t, quarry(t, env, "", "status").ok(t), "INSECURE")
	require.Contains(t, quarry(t, env, "", "doctor").out, "--insecure")
	require.NotContains(t, on(t, "status").ok(t), "INSECURE")
}
