package pool

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// slow is a replica that takes one range for each step.
type slow struct {
	memory []byte
	step   chan error
	behind int
}

func (s *slow) put(b []byte, off uint64) error {
	err := <-s.step
	if err == nil {
		copy(s.memory[off:], b)
	}
	return err
}

func newSlow(t *testing.T, limit int) (*slow, *queue) {
	s := &slow{memory: make([]byte, 4*limit), step: make(chan error)}
	q := newQueue(limit, s.put, func() { s.behind++ })
	t.Cleanup(func() {
		if t.Failed() {
			close(s.step) // ends a put that is left
		}
		q.drop()
		q.end()
	})
	return s, q
}

// TestQueueIsBounded: add waits while there is no room, what arrives is in order, and is what was added, not what is there later.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, size = 1 << 16, 1000
		s, q := newSlow(t, limit)
		local := make([]byte, size)
		added := 0
		go func() {
			for i := range 200 {
				for k := range local {
					local[k] = byte(i + 1)
				}
				if q.add(local, uint64(size*i)) != nil {
					return
				}
				added++
			}
		}()
		for put := range 200 {
			synctest.Wait()
			// At least all but what has been put is in the queue.
			require.LessOrEqual(t, (added-put)*size, limit)
			if put == 0 {
				// run took the first batch when it had one range or more, up to half of the limit.
				require.Greater(t, added*size, limit/2-2*size, "the room is used")
			}
			require.True(t, bytes.Equal(s.memory[size*put:][:size], make([]byte, size)))
			s.step <- nil
			synctest.Wait()
			require.True(t, bytes.Equal(s.memory[size*put:][:size], bytes.Repeat([]byte{byte(put + 1)}, size)), "number %d", put)
		}
		require.NoError(t, q.wait(t.Context()))
		require.Equal(t, 200, added)
	})
}

// TestQueueIsNeverEmpty: a caller waits for what was added before, and not for what others add meanwhile.
func TestQueueIsNeverEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, q := newSlow(t, 1<<16)
		require.NoError(t, q.add([]byte("0"), 0))
		waits := make(chan error, 1)
		go func() { waits <- q.wait(t.Context()) }()
		for i := uint64(1); ; i++ {
			synctest.Wait()
			if len(waits) > 0 {
				require.NoError(t, <-waits)
				break
			}
			require.Less(t, i, uint64(5))
			require.NoError(t, q.add([]byte("1"), i))
			s.step <- nil
		}
		require.Equal(t, "0", string(s.memory[:1]))
		go func() { s.step <- nil }()
		require.NoError(t, q.wait(t.Context()))
	})
}

// TestQueueDividesRanges: a range that is longer than the queue arrives in parts.
func TestQueueDividesRanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, q := newSlow(t, 1<<16)
		local := bytes.Repeat([]byte("0123456789"), 20000)
		close(s.step) // each step is taken
		require.NoError(t, q.add(local, 7))
		require.NoError(t, q.wait(t.Context()))
		require.True(t, bytes.Equal(local, s.memory[7:][:len(local)]))
	})
}

// TestQueueThatFails: nothing is put behind an error, callers are told, those that wait too, and it goes on when the replicas have been mended.
func TestQueueThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, q := newSlow(t, 1<<16)
		broken := errors.New("broken")
		var waits, full error
		require.NoError(t, q.add([]byte("x"), 10))
		synctest.Wait() // it is being put: a and b are put behind it, as one batch
		require.NoError(t, q.add([]byte("a"), 0))
		require.NoError(t, q.add([]byte("b"), 1))
		s.step <- nil
		synctest.Wait()
		go func() {
			for full == nil {
				full = q.add(make([]byte, 5000), 100)
			}
		}()
		go func() { waits = q.wait(t.Context()) }()
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		go func() { synctest.Wait(); cancel() }()
		require.ErrorIs(t, q.wait(ctx), context.Canceled)
		s.step <- broken
		synctest.Wait()
		for _, err := range []error{waits, full, q.add([]byte("c"), 2), q.wait(t.Context())} {
			require.ErrorIs(t, err, ErrBehind)
			require.ErrorIs(t, err, broken)
		}
		require.NotZero(t, s.behind)
		require.Equal(t, make([]byte, 3), s.memory[:3])

		q.drop()
		q.again()
		require.NoError(t, q.add([]byte("d"), 3))
		s.step <- nil
		require.NoError(t, q.wait(t.Context()))
		require.Equal(t, "d", string(s.memory[3:4]))

		// What waits is dropped, and counts as an error; what is being put is waited for.
		require.NoError(t, q.add([]byte("e"), 4))
		synctest.Wait()
		require.NoError(t, q.add([]byte("f"), 5))
		behind := s.behind
		go func() { synctest.Wait(); s.step <- nil }()
		q.drop()
		require.Equal(t, "e\x00", string(s.memory[4:6]))
		require.Greater(t, s.behind, behind)
		require.ErrorIs(t, q.wait(t.Context()), ErrBehind)
	})
}
