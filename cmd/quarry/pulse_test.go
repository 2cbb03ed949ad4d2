package main

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/teststop"
)

// pulsed is what is looked at of node list.
type pulsed []struct{ Name, State, Pulse string }

func (g pulsed) of(name string) (pulse, state string) {
	for _, n := range g {
		if n.Name == name {
			return n.Pulse, n.State
		}
	}
	return "", ""
}

// TestPulseOfProcesses stops a node, lets it go on, and kills another: the view
// shows it, and nobody has to be told of any address.
func TestPulseOfProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes; not with -short")
	}
	c, err := local.Start(t.Context(), local.Config{Binary: executable(t), Nodes: 3, RegionBytes: "16MiB"})
	require.NoError(t, err)
	t.Cleanup(func() { c.Stop() })
	until := func(what string, ok func(g pulsed) bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			var g pulsed
			quarry(t, []string{"QUARRY_CONTROLLER=" + c.URL}, "", "node", "list", "--json").decode(t, &g)
			return ok(g)
		}, patience, 50*time.Millisecond, what)
	}
	is := func(g pulsed, name, want string) bool { got, _ := g.of(name); return got == want }
	until("all are alive", func(g pulsed) bool { return is(g, "n1", "alive") && is(g, "n2", "alive") && is(g, "n3", "alive") })

	require.NoError(t, teststop.Stop(c.Process("n2").PID()))
	until("n2 is silent", func(g pulsed) bool { return is(g, "n2", "silent") && is(g, "n1", "alive") })
	until("and lost, as probes say", func(g pulsed) bool { _, s := g.of("n2"); return s == "silent" })
	require.NoError(t, c.Process("n2").Signal(syscall.SIGCONT))
	until("n2 is heard again", func(g pulsed) bool { _, s := g.of("n2"); return is(g, "n2", "alive") && s == "up" })

	c.Process("n3").Kill()
	until("n3 is silent", func(g pulsed) bool { return is(g, "n3", "silent") && is(g, "n1", "alive") && is(g, "n2", "alive") })
	require.NoError(t, c.Restart(t.Context(), "n3"))
	until("its next incarnation is alive", func(g pulsed) bool { _, s := g.of("n3"); return is(g, "n3", "alive") && s == "up" })
}
