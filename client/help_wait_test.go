package client

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/msg"
)

// A node that is not reached is asked again soon, one that cannot execute much later; a call of a function asks that one too, and a change
// whose outcome is unknown says nothing of the node.
func TestWhenANodeIsAskedAgain(t *testing.T) {
	for i, x := range []struct {
		op                  msg.ObjectOp
		err                 error
		soon, byVerbs, call bool // it is asked again within helpSoon; it is not asked now for a change, for a call
	}{
		{msg.ObjectWrite, fmt.Errorf("node 1: %w", errNotYet), true, true, true},
		{msg.ObjectWrite, fmt.Errorf("node 1: %w", msg.ErrProcedure), false, true, false},
		{msg.ObjectWrite, fmt.Errorf("node 1: %w", ErrUnreachable), false, true, false},
		{msg.ObjectWrite, fmt.Errorf("%w: no answer", ErrUnknown), true, false, false},
		{msg.ObjectWrite, fmt.Errorf("node 1: %w", &msg.Refusal{Procedure: msg.Object}), false, true, false},
		{msg.ObjectCall, fmt.Errorf("node 1: %w", &msg.Refusal{Procedure: msg.Object}), true, false, false}, // it knows no calls, and all else
	} {
		l := &lane{}
		l.help.again = map[uint32]int64{}
		l.noteFailure(1, x.op, x.err)
		// The clock may have passed helpSoon on a busy machine: what has to hold then is the other side of each pair.
		waits, calls := l.asksLater(1, msg.ObjectWrite), l.asksLater(1, msg.ObjectCall)
		if !x.soon {
			require.True(t, waits, "error %d", i)
		}
		if !x.byVerbs {
			require.False(t, waits, "error %d", i)
		}
		if !x.call {
			require.False(t, calls, "error %d", i)
		}
		require.Equal(t, x.byVerbs, l.help.again[1] != 0, "error %d", i)
		if x.soon && x.byVerbs {
			require.LessOrEqual(t, l.help.again[1]-clock.Now(), int64(helpSoon), "error %d", i)
		}
	}
	require.ErrorIs(t, errAskLater, errNotYet)
	require.True(t, earlier(fmt.Errorf("node 1: %w", &msg.Refusal{Procedure: msg.Object})))
}
