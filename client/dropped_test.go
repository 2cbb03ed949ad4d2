package client_test

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestDroppedConnectionsAreTriedAgain: a controller's port that strangers flood closes some of this client's
// connections before they have carried an answer. The call goes on until one has a place.
func TestDroppedConnectionsAreTriedAgain(t *testing.T) {
	refuses, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, refuses.Close())
	ended := "http://" + refuses.Addr().String() // another controller, which has ended
	for name, controllers := range map[string]func(drops string) []string{
		"alone":                 func(drops string) []string { return []string{drops} },
		"before one that ended": func(drops string) []string { return []string{drops, ended} },
		"behind one that ended": func(drops string) []string { return []string{ended, drops} },
	} {
		t.Run(name, func(t *testing.T) { testDropped(t, controllers) })
	}
}

func testDropped(t *testing.T, controllers func(drops string) []string) {
	cluster := testcluster.New(t, testcluster.Options{})
	controller := strings.TrimPrefix(cluster.Controller.URL(), "http://")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	const drops = 12
	dropped := make(chan int, 1)
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				dropped <- min(n, drops)
				return
			}
			if n < drops {
				_ = c.Close()
				continue
			}
			to, err := net.Dial("tcp", controller)
			if err != nil {
				_ = c.Close()
				continue
			}
			go func() { _, _ = io.Copy(to, c); to.Close() }()
			go func() { _, _ = io.Copy(c, to); c.Close() }()
		}
	}()
	c, err := client.Connect(t.Context(), client.Config{Controllers: controllers("http://" + l.Addr().String())})
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.NoError(t, l.Close())
	require.Equal(t, drops, <-dropped)
}
