package raw_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/raw"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// copying is a world with a replica that is being rebuilt, a copier and a writer.
func copying(t *testing.T) (w *slabtest.World, c *slabtest.Port, copier *raw.Lane, p *slabtest.Port, writer *raw.Lane) {
	w = slabtest.New(t, 2)
	c, copier = lane(t, w, 1)
	p, writer = lane(t, w, 2)
	require.NoError(t, writer.Write([]raw.Piece{{1, data, bytes.Repeat([]byte{7}, 1<<20)}}))
	c.Rebuild(1)
	p.Rebuild(1)
	return w, c, copier, p, writer
}

// TestWritersBesideTheCopier: the copier copies a whole piece before each round of a writer in turn.
func TestWritersBesideTheCopier(t *testing.T) {
	for name, change := range map[string]func(l *raw.Lane) error{
		"write": func(l *raw.Lane) error { return l.Write([]raw.Piece{{1, data + 13, bytes.Repeat([]byte{9}, 300)}}) },
		"add":   func(l *raw.Lane) error { _, err := l.Add(1, word, 1); return err },
	} {
		for at := 1; at <= 5; at++ {
			w, c, copier, p, writer := copying(t)
			first := p.Rounds()
			p.BeforeDo = func(n int, _ *rdma.Round) {
				if n-first == at {
					_, err := copier.CopyBlock(c.View(), 0)
					require.NoError(t, err)
				}
			}
			require.NoError(t, change(writer))
			_, err := copier.CopyBlock(c.View(), 1)
			require.NoError(t, err)
			if p.Rounds()-first < at { // the writer had ended before: the copier has not run
				_, err := copier.CopyBlock(c.View(), 0)
				require.NoError(t, err)
			}
			require.NoError(t, alike(w), "%s, the copier before round %d", name, at)
		}
	}
}

// TestRoundsOfACopy: a client that writes a whole piece under the copier costs it a repetition of what it did, and not
// rounds for each word. One that goes on writing costs no more than a CAS of each word, of which hundreds go in a round.
func TestRoundsOfACopy(t *testing.T) {
	for before, most := range map[int]int{1: 4, 2: 6, 3: 6, 4: 6, 5: 6, 0: 545} {
		t.Run(fmt.Sprint(before), func(t *testing.T) {
			w, c, copier, _, writer := copying(t)
			first := c.Rounds()
			c.BeforeDo = func(n int, _ *rdma.Round) {
				if n -= first; n == before || before == 0 && n <= 10 {
					require.NoError(t, writer.Write([]raw.Piece{{1, data, bytes.Repeat([]byte{byte(n)}, 1<<20)}}))
				}
			}
			_, err := copier.CopyBlock(c.View(), 0)
			require.NoError(t, err)
			require.LessOrEqual(t, c.Rounds()-first, most)
			require.NoError(t, alike(w))
		})
	}
}

// TestCopyOfWordsThatKeepChanging: clients change words of a piece without end, another one each time. The copier looks at each word for
// itself, so that it ends.
func TestCopyOfWordsThatKeepChanging(t *testing.T) {
	w, c, copier, _, writer := copying(t)
	rounds := 0
	c.BeforeDo = func(int, *rdma.Round) {
		rounds++
		require.Less(t, rounds, 50)
		_, err := writer.Add(1, word+8*uint64(rounds%40), 1)
		require.NoError(t, err)
	}
	_, err := copier.CopyBlock(c.View(), 0)
	require.NoError(t, err)
	c.BeforeDo = nil
	require.NoError(t, alike(w))
}

// TestCopyFlushesWhatIsAlike: a writer that has died before its FLUSH leaves bytes that are alike and not durable.
func TestCopyFlushesWhatIsAlike(t *testing.T) {
	w := slabtest.NewLedgers(t, 2)
	c, copier := lane(t, w, 1)
	c.Durable()
	c.Rebuilding(1)
	for _, n := range w.Nodes {
		proto.PutWord(n.Memory.Bytes(), word, 5)
	}
	_, err := copier.CopyBlock(c.View(), 0)
	require.NoError(t, err)
	require.EqualValues(t, 5, afterPowerLoss(w, 1, word))
}
