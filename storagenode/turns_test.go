package storagenode

import (
	"runtime"
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

// A turn that is kept and named, one that is waited for, and one that is passed on, allocate nothing: a node passes tens of thousands of turns in a second.
func TestTurnsAllocateNothing(t *testing.T) {
	var q turns
	until := clock.In(time.Hour)
	asks, has, leaves := make(chan struct{}), make(chan struct{}), make(chan struct{})
	defer close(asks)
	go func() {
		for range asks {
			q.enter(1, 0, until)
			has <- struct{}{}
			q.leave(1)
			leaves <- struct{}{}
		}
	}()
	cycle := func() {
		if !q.enter(1, 0, until) || !q.enter(1, q.keep(1), until) {
			t.Error("no turn")
		}
		asks <- struct{}{}
		for waiting := 0; waiting == 0; runtime.Gosched() {
			q.mu.Lock()
			waiting = q.waiting
			q.mu.Unlock()
		}
		q.leave(1)
		<-has
		<-leaves
	}
	cycle()
	require.Zero(t, testing.AllocsPerRun(100, cycle))
}

// A turn's timer that runs late ends no later turn of the object, and none of another one.
func TestLateTimerOfATurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q turns
		until := clock.In(time.Hour)
		require.True(t, q.enter(1, 0, until))
		number := q.keep(1)
		first := q.objects[1]
		require.True(t, q.enter(1, number, until))
		require.False(t, first.over.Stop(), "the timer has been stopped")
		q.leave(1)
		require.True(t, q.enter(2, 0, until))
		require.Same(t, first, q.objects[2], "used again")
		number = q.keep(2)
		q.end(first) // the timer of the turn at 1, which was stopped too late
		require.Equal(t, number, first.kept, "the turn is kept")
		require.True(t, q.enter(2, number, until))
		q.end(first)
		require.NotNil(t, q.objects[2], "a request has it")
		q.keep(2)
		time.Sleep(keepTurn)
		synctest.Wait()
		require.Empty(t, q.objects, "its own time has come")
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
