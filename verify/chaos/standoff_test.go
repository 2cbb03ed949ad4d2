package chaos

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/internal/etcdembed"
	"github.com/quarrystore/quarry/internal/pulse"
)

// controllerEnv makes the test binary a controller: the endpoint of etcd, its address.
const controllerEnv = "QUARRY_CHAOS_CONTROLLER"

// controllerProcess runs one until it is killed, and says what it sees as it changes.
func controllerProcess(endpoint, address string) int {
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err == nil {
		defer etcd.Close()
		var c *controller.Controller
		if c, err = controller.Start(context.Background(), controller.Config{Etcd: etcd, Listen: address + ":7420", Name: address}); err == nil {
			for last := ""; ; time.Sleep(10 * time.Millisecond) {
				s := c.Stats(context.Background())
				alive := 1 // itself
				for _, m := range s.Members {
					if m.State == pulse.Alive {
						alive++
					}
				}
				if now := fmt.Sprintln(s.Leads, alive, s.Deposed); now != last {
					last = now
					os.Stdout.WriteString(now)
				}
			}
		}
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// seen is what such a process has said last.
type seen struct {
	leads   bool
	alive   int // members that are heard, itself too
	deposed int // leaders, by it
}

// Two controllers that reach etcd and not each other: each takes the other for gone.
// The standby deposes the leader, which is well, and it stays at that; when the new
// leader is gone indeed, the old one leads again.
func TestControllersThatDoNotSeeEachOther(t *testing.T) {
	if testing.Short() {
		t.Skip("waits whether one controller leaves the other alone; not with -short")
	}
	n, err := newNetwork()
	if err != nil {
		t.Skip("no network namespaces: ", err)
	}
	defer n.close()
	// A socket of the file system: it is there in every network.
	etcd, err := etcdembed.Start(t.Context(), etcdembed.Config{NoSync: true, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer etcd.Close()
	begin := func(name string) (*exec.Cmd, func() seen) {
		h, err := n.host(name)
		require.NoError(t, err)
		p := exec.Command("ip", "netns", "exec", n.ns(name), os.Args[0], "-test.run=TestMain")
		p.Env = append(os.Environ(), controllerEnv+"="+etcd.Endpoint()+" "+h.Address)
		p.Stderr = os.Stderr
		out, err := p.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, p.Start())
		var last atomic.Pointer[seen]
		last.Store(&seen{})
		read := make(chan struct{})
		go func() {
			defer close(read)
			for lines := bufio.NewScanner(out); lines.Scan(); {
				s := &seen{}
				if _, err := fmt.Sscan(lines.Text(), &s.leads, &s.alive, &s.deposed); err == nil {
					last.Store(s)
				}
			}
		}()
		t.Cleanup(func() { _ = p.Process.Kill(); <-read; _ = p.Wait() })
		return p, func() seen { return *last.Load() }
	}
	eventually := func(what string, ok func() bool) {
		t.Helper()
		require.Eventually(t, ok, patience, 10*time.Millisecond, what)
	}
	_, a := begin("a")
	eventually("a leads", func() bool { return a().leads })
	b, sees := begin("b")
	eventually("they see each other", func() bool { return a().alive == 2 && sees().alive == 2 })
	require.NoError(t, n.part("a", "b"))
	eventually("b has deposed a and leads", func() bool { return sees() == seen{true, 1, 1} && !a().leads })
	// Long enough for probes, a deposition and the wait behind it.
	require.Never(t, func() bool { return a().leads || a().deposed > 0 || !sees().leads }, 6*time.Second, 10*time.Millisecond)
	require.NoError(t, b.Process.Kill())
	eventually("a leads again, when etcd has counted b's lease", func() bool { return a().leads })
	require.Zero(t, a().deposed)
	require.True(t, strings.HasPrefix(etcd.Endpoint(), "unix"))
}
