package rdma

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A FLUSH is left to the next one only where nothing between them waits for the first.
func TestLeftToLater(t *testing.T) {
	flush := func(c *Chain) { c.Flush(Persistent, 0, 8) }
	for name, c := range map[string]struct {
		between func(c *Chain)
		left    bool
	}{
		"nothing":               {func(*Chain) {}, true},
		"WRITE":                 {func(c *Chain) { c.Write(0, make([]byte, 8)) }, true},
		"CAS":                   {func(c *Chain) { c.CAS(0, 0, 1) }, true},
		"FLUSH that is visible": {func(c *Chain) { c.Flush(Visible, 0, 8) }, true},
		"READ":                  {func(c *Chain) { c.Read(0, make([]byte, 8)) }, false},
		"VERIFY":                {func(c *Chain) { c.Verify(0, 8, 0) }, false},
		"fenced WRITE":          {func(c *Chain) { c.Write(0, make([]byte, 8)); c.Fenced() }, false},
		"fenced FLUSH":          {func(c *Chain) { flush(c); c.Fenced() }, false},
	} {
		var ch Chain
		flush(&ch)
		c.between(&ch)
		flush(&ch)
		require.Equal(t, c.left, LeftToLater(ch.Verbs, 0), name)
		require.False(t, LeftToLater(ch.Verbs, len(ch.Verbs)-1), "%s: the last", name)
	}
}

func TestFlushMethodOf(t *testing.T) {
	for m := Native; m < flushMethods; m++ {
		require.Equal(t, m, FlushMethodOf(true, byte(m)))
		require.Equal(t, NoFlush, FlushMethodOf(false, byte(m)))
	}
	require.Equal(t, Message, FlushMethodOf(true, 0), "a node of an earlier version")
	require.Equal(t, Message, FlushMethodOf(true, byte(flushMethods)), "a node of a later version")
	require.Equal(t, "agent", Message.String())
	require.Equal(t, "flush method 5", flushMethods.String())
}
