package flight

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

// A session has one timer, whatever the number of its calls, and ends when it was unused for long.
func TestSessionsHaveOneTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s callers
		s.init(&Config{Callers: 1, Connect: func(context.Context, string, string, bool) (*client.Client, error) { return nil, nil }})
		enter := func() *caller {
			c, err := s.enter(t.Context(), principal{token: "t"})
			require.NoError(t, err)
			return c
		}
		c := enter()
		s.leave(c)
		first := c.timer
		require.NotNil(t, first)
		for range 3 {
			time.Sleep(idleSession - time.Second) // on the clock of the test
			require.Same(t, c, enter())
			s.leave(c)
			require.Same(t, first, c.timer)
		}
		time.Sleep(idleSession - time.Second)
		synctest.Wait()
		require.Equal(t, 1, s.count())
		time.Sleep(time.Second)
		synctest.Wait()
		require.Zero(t, s.count())
		s.close()
	})
}
