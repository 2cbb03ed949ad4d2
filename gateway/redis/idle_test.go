package redis_test

import (
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
)

// TestIdleConnectionsKeepNoInput: the buffer of a long command is given back when the command has ended, also
// by what the parser and the commands remember of it.
func TestIdleConnectionsKeepNoInput(t *testing.T) {
	const connections, bytes = 8, 16 << 20
	addr := gateway(t, redis.Config{})
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what a finalizer or a pool held
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for range connections {
		p := dial(t, addr)
		p.send(frame("HGET", "x", strings.Repeat("f", bytes)))
		_ = p.reply()
		require.Equal(t, "+PONG", p.do("PING"))
	}
	require.Less(t, heap()-before, int64(connections*bytes/2))
}
