package clientsim

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

// The faults of themes strike the nodes that live.
func TestFaultsBesideADeadNode(t *testing.T) {
	for _, o := range []Options{{End: true}, {Stuck: true}} {
		synctest.Test(t, func(t *testing.T) {
			o.Regions = 1
			c, err := Start(1, o)
			defer c.close()
			require.NoError(t, err)
			r := &run{Cluster: c, ctx: c.ctx, h: newHistory()}
			p, cl, err := c.Client(c.ctx, "client", client.Config{Lanes: 1})
			require.NoError(t, err)
			c.killNode(1)
			require.True(t, r.hurtByTheme(nil, &incarnation{p: p, cl: cl}))
			r.background.Wait()
			require.Empty(t, c.problems)
			c.heal()
			_ = cl.Close() // its session was ended, or it reaches no node
		})
	}
}
