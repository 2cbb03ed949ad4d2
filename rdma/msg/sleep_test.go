package msg_test

import (
	"context"
	"iter"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

// split is a connection to a node that stands between any two of its accesses to the mailbox while verbs of the client run, and while the
// kernel puts the client's thread to sleep.
type split struct {
	*still
	step   func(struct{}) bool // yields before each access of the node
	next   func() (struct{}, bool)
	at     []int // how far the node has come before each of the client's steps behind its request
	taken  int   // steps of the client
	done   int   // accesses of the node
	over   bool  // of the node: it has answered
	asleep bool  // the client's thread
	slept  int
}

func (s *split) pause() {
	if s.step != nil {
		s.step(struct{}{})
	}
}
func (s *split) Word(off uint64) uint64     { s.pause(); return s.words.Word(off) }
func (s *split) Set(off, word uint64)       { s.pause(); s.words.Set(off, word) }
func (s *split) Load(off uint64, b []byte)  { s.pause(); s.words.Load(off, b) }
func (s *split) Store(off uint64, b []byte) { s.pause(); s.words.Store(off, b) }

func (s *split) Open(_ context.Context, _ uint32, nonce uint64) (rdma.Window, error) {
	s.server = msg.NewServer(s, nonce)
	s.server.WakeBy(func() { s.asleep = false })
	return rdma.Window{Region: rdma.Mailbox, Key: 1, Bytes: msg.MailboxBytes}, nil
}

// turn brings the node as far as the schedule says for the client's next step.
func (s *split) turn() {
	to := 1 << 20
	if s.taken < len(s.at) {
		to = s.at[s.taken]
	}
	s.taken++
	s.run(to)
}

func (s *split) run(to int) {
	for s.done < to && !s.over {
		_, more := s.next()
		s.done, s.over = s.done+1, !more
	}
}

func (s *split) Post(c *rdma.Chain) {
	for i := range c.Verbs {
		if v := &c.Verbs[i]; v.Op == rdma.Write {
			if v.Off < 4096 {
				s.turn()
			}
			s.words.Store(v.Off, v.Buf)
		} else {
			if s.taken > 0 {
				s.turn()
			}
			s.words.Load(v.Off, v.Buf)
		}
	}
	c.Done, c.Err = len(c.Verbs), nil
}

func (s *split) Ring(*rdma.Window, uint64) {}
func (s *split) Sleep(_ *rdma.Window, off uint64, seen uint32, _ time.Duration) bool {
	s.turn()
	s.slept++
	s.asleep = uint32(s.words.Word(off)) == seen
	s.run(1 << 20)
	return true
}

// A client tells that it sleeps, looks once more, and sleeps, while its node answers: however the steps of the two follow each other, the client
// finds the answer, or does not begin to sleep, or is woken.
func TestHazard315_ClientSleepsBesideItsAnswer(t *testing.T) {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	schedules, slept := 0, 0
	// The steps are WRITE listens, READ answered, valid and answer, the kernel; behind its accesses for this call the node looks at other slots.
	const steps, accesses = 5, 10
	var at [steps]int
	var from func(step, low int)
	from = func(step, low int) {
		if step < steps {
			for at[step] = low; at[step] <= accesses; at[step]++ {
				if at[step] > 0 && at[step] < 4 { // the node loads and copies the request
					continue
				}
				from(step+1, at[step])
			}
			return
		}
		s := &split{still: &still{words: newWords()}, at: at[:]}
		c, err := msg.Open(t.Context(), s, heap{})
		require.NoError(t, err)
		c.SetLooks(0)
		next, stop := iter.Pull(func(yield func(struct{}) bool) {
			s.step = yield
			_, err := s.server.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
			require.NoError(t, err)
		})
		defer stop()
		s.next = next
		answer := make([]byte, 1)
		_, err = c.Call(t.Context(), msg.Echo, []byte("x"), answer)
		require.NoError(t, err)
		require.False(t, s.asleep, "the client sleeps, and nothing wakes it: %v", at)
		schedules++
		slept += s.slept
	}
	from(0, 0)
	t.Log(schedules, "schedules,", slept, "with a sleep")
	require.Greater(t, slept, 100)
}

// early is a connection over shm to a node of an earlier version, which is woken through the socket, wakes no client and knows none of the words for that.
type early struct {
	*still
	t *testing.T
}

func (e *early) Ring(*rdma.Window, uint64) { e.t.Fatal("no thread of this node sleeps") }
func (e *early) Sleep(*rdma.Window, uint64, uint32, time.Duration) bool {
	e.t.Fatal("this node would not wake the client")
	return false
}

// A client that can sleep in a thread meets a node of an earlier version, which wakes no clients: the client wakes the node through the socket, and polls for the answer.
func TestClientOfAnEarlierNode(t *testing.T) {
	arena, err := rdma.NewArena(msg.BufferBytes)
	require.NoError(t, err)
	defer arena.Close()
	s := &early{still: &still{words: newWords()}, t: t}
	c, err := msg.Open(t.Context(), s, arena)
	require.NoError(t, err)
	c.SetLooks(0)
	for calls := 1; calls <= 3; calls++ {
		c.SetPause(func(_ context.Context, try int) error {
			if require.Equal(t, calls, s.woken); try == 3 {
				s.server.Wake()
				_, err := s.server.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
				require.NoError(t, err)
				require.True(t, s.server.Sleep(false))
			}
			return nil
		})
		answer := make([]byte, 1)
		_, err = c.Call(t.Context(), msg.Echo, []byte("x"), answer)
		require.NoError(t, err)
		require.Equal(t, "x", string(answer))
	}
}
