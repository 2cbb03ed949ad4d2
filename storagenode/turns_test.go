package storagenode

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
)

// TestTurns: requests for one object come one after the other, in their order; a turn that is kept goes to the request that names it,
// and to the next one when it does not come.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q turns
		late := func() int64 { return clock.In(time.Hour) }
		require.True(t, q.enter(1, 0, late()))
		require.True(t, q.enter(2, 0, late()), "another object")

		order := make(chan int, 3)
		for i := range 3 {
			go func() {
				if q.enter(1, 0, late()) {
					order <- i
				}
			}()
			synctest.Wait()
		}
		require.False(t, q.enter(1, 0, clock.In(time.Millisecond)), "its time is up")
		require.Empty(t, order)
		q.leave(1)
		require.Equal(t, 0, <-order)
		number := q.keep(1)
		synctest.Wait()
		require.Empty(t, order, "the turn is kept")
		require.True(t, q.enter(1, number, late()), "for the request that names it")
		q.keep(1)
		began := clock.Now()
		require.Equal(t, 1, <-order)
		require.GreaterOrEqual(t, clock.Now()-began, int64(keepTurn), "nothing comes: the next one has it after a while")
		q.leave(1)
		require.Equal(t, 2, <-order)
		require.False(t, q.enter(1, number, clock.In(time.Millisecond)), "an old number is nothing")
		q.leave(1)
		q.leave(2)
		require.Empty(t, q.objects, "what is left")
		require.Zero(t, q.waiting)

		q.enter(3, 0, late())
		for range maxWaiting {
			go q.enter(3, 0, clock.In(time.Second))
		}
		synctest.Wait()
		require.False(t, q.enter(3, 0, late()), "too many wait")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Zero(t, q.waiting)
	})
}

// TestOtherCallers: a caller is told of others that have sent requests for the same object lately.
func TestOtherCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q turns
		require.False(t, q.others(1, 7))
		require.False(t, q.others(1, 7))
		require.False(t, q.others(2, 8), "another object")
		require.True(t, q.others(1, 8))
		require.True(t, q.others(1, 8))
		time.Sleep(othersFor)
		require.False(t, q.others(1, 8), "the other has gone")
		require.True(t, q.others(1, 7))
	})
}
