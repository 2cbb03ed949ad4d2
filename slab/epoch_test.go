package slab_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestHazard178_NoReservationOutlivesAnEpoch: the epoch ends under an Update, and the time of the call is up before the region is open again. The table has
// the later epoch, whose reconcile clears the reservation: the session need not end for it, and the call has its answer. Without the later
// epoch in the table the reservation may be there, and the session ends. It ends, too, for a change that has been posted (hazard 208).
func TestHazard178_NoReservationOutlivesAnEpoch(t *testing.T) {
	errUser := errors.New("no change")
	for _, known := range []bool{true, false} {
		for _, fails := range []bool{true, false} {
			w := slabtest.New(t, 2)
			p, other := w.Lane(1), w.Lane(2)
			ref, err := p.Alloc.Alloc([]byte("before"), alloc.Want{Replicas: 2})
			require.NoError(t, err)
			_, err = p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) {
				epoch := p.View().Epoch
				other.NextEpoch()
				p.OnRegion = func() error { return context.DeadlineExceeded }
				if known {
					p.Later = epoch + 1
				}
				if fails {
					return nil, errUser
				}
				return []byte("after"), nil
			})
			if fails {
				require.ErrorIs(t, err, errUser)
			} else {
				require.ErrorIs(t, err, slab.ErrUnknown)
			}
			require.Equal(t, known && fails, p.Ended == nil, "fails %v: %v", fails, p.Ended)
		}
	}
}

// TestHazard208_NoChangeOutlivesItsSession: the epoch ends behind the round of an Update that changes the backup, and the time of the call is up before the
// region is open again. The reconcile keeps the change: so the session must not go on, and be closed in good order, before.
func TestHazard208_NoChangeOutlivesItsSession(t *testing.T) {
	w := slabtest.New(t, 2)
	p, other := w.Lane(1), w.Lane(2)
	ref, err := p.Alloc.Alloc([]byte("before"), alloc.Want{Replicas: 2})
	require.NoError(t, err)
	p.AfterDo = func(_ int, r *rdma.Round) {
		if r.Len() != 2 {
			return
		}
		p.AfterDo = nil
		p.Later = p.View().Epoch + 1
		other.NextEpoch()
		p.OnRegion = func() error { return context.DeadlineExceeded }
	}
	require.ErrorIs(t, update(p.Lane, ref, []byte("after")), slab.ErrUnknown)
	require.Nil(t, p.AfterDo)
	require.Error(t, p.Ended)
	_, err = other.Lane.Reconcile(other.View())
	require.NoError(t, err)
	b, _, err := other.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "after", string(b))
}
