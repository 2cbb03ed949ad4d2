package member

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// A list that is closed says nothing more, whatever its goroutines still have to say.
func TestNothingIsSaidAfterTheEnd(t *testing.T) {
	var out bytes.Buffer
	w := &lines{log: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	w.logger().Println("[ERR] memberlist: a stranger")
	require.Contains(t, out.String(), `msg="gossip: memberlist: a stranger"`)
	w.stop()
	out.Reset()
	w.logger().Println("late")
	require.Zero(t, out.Len())
}
