package storagenode_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/pulse"
)

// A node that hears the leader's pulse sends heartbeats when it is told to, and at once when
// it does not hear that leader any more, or is about to stop.
func TestHeartbeatsFollowThePulse(t *testing.T) {
	b := newBoss(t)
	port, err := pulse.Listen(t.Context(), "127.0.0.1:0", "")
	require.NoError(t, err)
	var term atomic.Uint64
	heard, err := port.Join(pulse.Config{Cluster: b.cluster[:], Secret: make([]byte, 32), Kind: pulse.Controller, Incarnation: 77, Logger: quiet(),
		Self: func() pulse.Self { return pulse.Self{Term: term.Load()} }})
	require.NoError(t, err)
	t.Cleanup(func() { heard.Close() })
	b.with(func() { b.calmMs, b.pulse = 3_600_000, []string{port.Address()} })

	n := b.start(b.config(""))
	beats := func() (n int) { b.with(func() { n = b.beats }); return n }
	// Nobody leads: heartbeats come often, and one more than there were.
	more := func(what string) {
		t.Helper()
		was := beats()
		eventually(t, what, func() bool { return beats() > was })
	}
	rest := func(what string) {
		t.Helper()
		was := beats()
		require.Eventually(t, func() bool { now := beats(); same := now == was; was = now; return same }, patience, 20*40*time.Millisecond, what)
	}
	for range 10 {
		more("the leader is not heard")
	}
	term.Store(5)
	rest("it is heard")
	term.Store(0)
	more("it does not lead any more")
	more("and another time")
	term.Store(6)
	rest("it leads again")
	eventually(t, "the node is heard", func() bool { return len(heard.Members()) == 1 })
	require.NoError(t, n.Leave(t.Context()), "its heartbeat comes, though not for an hour")
	require.NoError(t, n.Close())
	eventually(t, "it has said goodbye", func() bool { return heard.Members()[0].State == pulse.Silent })
}
