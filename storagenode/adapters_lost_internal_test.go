package storagenode

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/storagenode/state"
)

// TestHazard273_AdapterThatHangs: the driver of an adapter that has failed holds the call that destroys a queue pair. The node does not tell the loss,
// and says within actTimeout that it has to end. An adapter whose access ends is told lost.
func TestHazard273_AdapterThatHangs(t *testing.T) {
	for name, hangs := range map[string]bool{"ends": false, "hangs": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				release := make(chan struct{})
				defer close(release)
				shut := func(context.Context) error {
					if hangs {
						<-release
					}
					return nil
				}
				n := &Node{cfg: Config{Name: "n", Logger: slog.New(slog.DiscardHandler)}, failed: make(chan error, 1), renew: make(chan struct{}, 1), saving: make(chan struct{}, 1)}
				n.ctx, n.cancel = context.WithCancel(t.Context())
				defer n.cancel()
				n.memories = map[uint32]*host.Memory{}
				n.state = state.New(state.Limits{Adapters: 2}, state.Kept{}, nil)
				n.adapters = []*adapter{{shut: shut}, {number: 1, shut: shut}}
				n.access = &access{adapters: n.adapters}
				began := time.Now()
				go n.lose(n.adapters[1], errors.New("it is removed"))
				if !hangs {
					<-n.renew
					require.Equal(t, []uint32{1}, n.state.LostAdapters())
					require.Equal(t, n.adapters[:1], n.access.live())
					return
				}
				err := <-n.failed
				require.ErrorContains(t, err, "it is removed")
				require.ErrorContains(t, err, "has not ended")
				require.LessOrEqual(t, time.Since(began), actTimeout, "on the clock of the test")
				require.Empty(t, n.state.LostAdapters())
				require.Len(t, n.access.live(), 2)
			})
		})
	}
}
