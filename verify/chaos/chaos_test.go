package chaos

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testbinary"
)

// patience bounds the wait for what must come: it ends a test that hangs, and no other.
const patience = 3 * time.Minute

func TestMain(m *testing.M) {
	lead := strings.Fields(os.Getenv(controllerEnv))
	switch what := strings.Fields(os.Getenv(udpEnv)); {
	case len(lead) == 2:
		os.Exit(controllerProcess(lead[0], lead[1]))
	case IsWorker():
		os.Exit(Worker())
	case len(what) == 2:
		os.Exit(datagram(what[0], what[1]))
	}
	os.Exit(m.Run())
}

// udpEnv makes the test binary one end of a datagram's way.
const udpEnv = "QUARRY_CHAOS_UDP"

// datagram sends some, or waits for one: exit code 0 if it came.
func datagram(what, address string) int {
	at := &net.UDPAddr{IP: net.ParseIP(address), Port: 9999}
	if what == "send" {
		c, err := net.DialUDP("udp", nil, at)
		for range 5 {
			if err != nil {
				break
			}
			_, err = c.Write([]byte("hello"))
		}
		return 0
	}
	c, err := net.ListenUDP("udp", at)
	if err != nil {
		return 2
	}
	c.SetReadDeadline(time.Now().Add(700 * time.Millisecond))
	os.Stdout.WriteString("ready\n")
	if _, err := c.Read(make([]byte, 16)); err != nil {
		return 1
	}
	return 0
}

// TestShortRun hurts real processes a few times. What it cannot do here, because
// there are no network namespaces, it says and leaves out.
func TestShortRun(t *testing.T) {
	shortRun(t, Config{Faults: []string{"node-kill", "link-down", "client-stop", "leader-kill"}})
}

// TestShortRunOfStagedSlabs: the same with one replica, objects and trees in STAGED slabs.
func TestShortRunOfStagedSlabs(t *testing.T) {
	shortRun(t, Config{Replicas: 1, Slab: client.StagedSlab, Faults: []string{"node-kill", "client-kill", "node-drain", "full"}})
}

// TestShortRunOfOpenWords: the same in regions with open words, whose clients read at every replica.
func TestShortRunOfOpenWords(t *testing.T) {
	shortRun(t, Config{OpenWords: true, Faults: []string{"node-kill", "client-kill", "client-stop"}})
}

func shortRun(t *testing.T, cfg Config) *Report {
	if testing.Short() {
		t.Skip("real processes and real leases take half a minute; not with -short")
	}
	self, err := os.Executable()
	require.NoError(t, err)
	binary := filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")
	cfg.Binary, cfg.Self, cfg.Repeats, cfg.Lease, cfg.Pace, cfg.Say = binary, self, 1, 3*time.Second, 5*time.Millisecond, t.Logf
	rep, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	var table strings.Builder
	rep.Text(&table)
	t.Log(table.String())
	require.True(t, rep.OK(), table.String())
	for _, row := range rep.Rows {
		require.NotZero(t, row.Runs, row.Fault)
		require.Greater(t, row.Succeeded, 100, row.Fault)
	}
	return rep
}

// TestFaultsOfTheNetwork: what the harness calls a cut, a mute and a deaf member is one.
func TestFaultsOfTheNetwork(t *testing.T) {
	n, err := newNetwork()
	if err != nil {
		t.Skip("no network namespaces: ", err)
	}
	defer n.close()
	a, err := n.host("a")
	require.NoError(t, err)
	b, err := n.host("b")
	require.NoError(t, err)
	// A datagram from one to the other, heard or not. The listener says when it is there.
	heard := func(from, to string, at string) bool {
		listen := exec.Command("ip", "netns", "exec", n.ns(to), os.Args[0], "-test.run=TestMain")
		listen.Env = append(os.Environ(), udpEnv+"=listen "+at)
		out, err := listen.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, listen.Start())
		line := make([]byte, 6)
		_, err = out.Read(line)
		require.NoError(t, err)
		send := exec.Command("ip", "netns", "exec", n.ns(from), os.Args[0], "-test.run=TestMain")
		send.Env = append(os.Environ(), udpEnv+"=send "+at)
		_ = send.Run() // a link that is down may say so
		return listen.Wait() == nil
	}
	// A link that comes up may lose what is sent first, and a listener that is starved is late.
	hears := func(heard func() bool) {
		t.Helper()
		require.Eventually(t, heard, patience, time.Millisecond)
	}
	hears(func() bool { return heard("a", "b", b.Address) })
	require.NoError(t, n.mute("a"))
	require.False(t, heard("a", "b", b.Address))
	hears(func() bool { return heard("b", "a", a.Address) })
	require.NoError(t, n.unmute("a"))
	require.NoError(t, n.deafen("a"))
	hears(func() bool { return heard("a", "b", b.Address) })
	require.False(t, heard("b", "a", a.Address))
	require.NoError(t, n.undeafen("a"))
	require.NoError(t, n.cut("a"))
	require.False(t, heard("a", "b", b.Address))
	require.NoError(t, n.join("a"))
	hears(func() bool { return heard("a", "b", b.Address) })
}

func TestUnknownFault(t *testing.T) {
	_, err := Run(t.Context(), Config{Binary: "nothing", Loopback: true, Faults: []string{"flood"}})
	require.ErrorContains(t, err, "want one of [node-kill")
}

// TestPowerFails: all storage nodes lose power under durable writes, and half of the words that were not durable. What was acknowledged is there, and every history is one of a store that never lost power.
func TestPowerFails(t *testing.T) {
	if why := needsLedgers(Config{}); why != "" {
		t.Skip("power cannot fail here: ", why)
	}
	rep := shortRun(t, Config{Faults: []string{"power"}, Nodes: 2, Controllers: 1, Plain: true, Loopback: true})
	require.NotZero(t, rep.Rows[0].LinesLost, "the losses of power have lost nothing: they show nothing")
}
