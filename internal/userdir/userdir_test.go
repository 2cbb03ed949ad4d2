package userdir

import (
	"bytes"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
)

func TestTokensAreOfOneUserAndOnePort(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	require.Empty(t, Token("127.0.0.1:7420"))
	d, err := Keep("127.0.0.1:7420", "secret", []byte("authority"))
	require.NoError(t, err)
	for _, file := range []string{d.TokenFile, authorityFile("7420")} {
		st, err := os.Stat(file)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), st.Mode())
	}
	for address, want := range map[string]string{
		"127.0.0.1:7420": "secret", "localhost:7420": "secret", "[::1]:7420": "secret",
		"127.0.0.1:7421": "", "10.0.0.1:7420": "", "some.host:7420": "", "127.0.0.1": "", "": "",
	} {
		require.Equal(t, want, Token(address), address)
	}
	file := d.TokenFile
	require.NoError(t, d.Close())
	require.NoFileExists(t, file)
	require.NoFileExists(t, authorityFile("7420"))
	require.Empty(t, Token("127.0.0.1:7420"))

	// A folder in which others can write is not believed.
	d, err = Keep("127.0.0.1:7420", "another", []byte("authority"))
	require.NoError(t, err)
	defer d.Close()
	require.Equal(t, "another", Token("127.0.0.1:7420"))
	require.NoError(t, os.Chmod(Path(), 0o777))
	require.Empty(t, Token("127.0.0.1:7420"))
	_, err = Keep("127.0.0.1:7421", "secret", []byte("authority"))
	require.ErrorContains(t, err, "remove it")
	require.NoError(t, os.Chmod(Path(), 0o755))
}

// The files of a process that was killed do not count: another program may have the port.
func TestFilesOfAKilledProcessDoNotCount(t *testing.T) {
	if os.Getenv("KEEP_AND_WAIT") != "" {
		_, err := Keep("127.0.0.1:7420", "secret", []byte("authority"))
		require.NoError(t, err)
		_, _ = os.Stdout.WriteString("kept\n")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the other end is gone
		return
	}
	t.Setenv("TMPDIR", t.TempDir())
	exe, err := os.Executable()
	require.NoError(t, err)
	killed := exec.Command(exe, "-test.run", "^"+t.Name()+"$")
	killed.Env = append(os.Environ(), "KEEP_AND_WAIT=yes")
	_, err = killed.StdinPipe()
	require.NoError(t, err)
	out, err := killed.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, killed.Start())
	_, err = io.ReadFull(out, make([]byte, len("kept\n")))
	require.NoError(t, err)
	require.Equal(t, "secret", Token("127.0.0.1:7420"))
	require.NoError(t, killed.Process.Kill())
	_ = killed.Wait()
	require.FileExists(t, tokenFile("7420"))
	require.Empty(t, Token("127.0.0.1:7420"))

	// The next one takes their place, also without a token.
	d, err := Keep("127.0.0.1:7420", "", []byte("authority"))
	require.NoError(t, err)
	defer d.Close()
	require.Empty(t, Token("127.0.0.1:7420"))
	require.NoFileExists(t, tokenFile("7420"))
}

// serve serves with a certificate of a new authority at an address.
func serve(t *testing.T, address string) (at string, authority []byte, stop func()) {
	a, ca, _, err := identity.NewAuthority("dev", time.Hour)
	require.NoError(t, err)
	conf, err := a.Serve(identity.Controller, "dev", []string{"127.0.0.1", "localhost"}, time.Hour)
	require.NoError(t, err)
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}))
	s.Listener.Close()
	s.Listener = tls.NewListener(l, conf)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	return l.Addr().String(), ca, s.Close
}

// Calls of a quarry dev of this user are encrypted, and go to it alone.
func TestCallsOfDevAreEncrypted(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	at, authority, stop := serve(t, "127.0.0.1:0")
	h := &http.Client{Transport: Transport(&http.Transport{})}
	defer h.CloseIdleConnections()
	say := func() (string, error) {
		res, err := h.Post("http://"+at, "text/plain", strings.NewReader("hello"))
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		var b bytes.Buffer
		_, err = b.ReadFrom(res.Body)
		return b.String(), err
	}
	got, err := say()
	require.NoError(t, err)
	require.Contains(t, got, "HTTP request to an HTTPS server", "no quarry dev is known: the call is plain")

	d, err := Keep(at, "", authority)
	require.NoError(t, err)
	got, err = say()
	require.NoError(t, err)
	require.Equal(t, "hello", got)

	// The SDK sends nothing to a server at that port whose certificate another authority has signed.
	stop()
	h.CloseIdleConnections()
	_, other, stop := serve(t, at)
	_, err = say()
	require.ErrorContains(t, err, "certificate signed by unknown authority")

	// One quarry dev has a port, whatever its address.
	_, port, err := net.SplitHostPort(at)
	require.NoError(t, err)
	_, err = Keep("127.0.0.2:"+port, "", other)
	require.ErrorContains(t, err, "another quarry dev of this user has port "+port)

	// The next quarry dev has another authority.
	require.NoError(t, d.Close())
	d, err = Keep(at, "", other)
	require.NoError(t, err)
	defer d.Close()
	got, err = say()
	require.NoError(t, err)
	require.Equal(t, "hello", got)
	stop()

	own := &http.Transport{TLSClientConfig: &tls.Config{}}
	require.Same(t, own, Transport(own), "certificates of the caller's own are not replaced")
}
