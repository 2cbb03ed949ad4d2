package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// account is a payload.
func account(n int64) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(n)) }

func amount(b []byte) int64 { return int64(binary.LittleEndian.Uint64(b)) }

// accounts makes objects with 0 in them, the last of them in another region than the first.
func accounts(t *testing.T, c *client.Client, n, replicas int) (refs []client.Ref) {
	for range n {
		ref, err := c.Alloc(t.Context(), account(0), client.AllocOptions{Replicas: replicas})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	return refs
}

// Transfers between accounts, by clients that reserve overlapping sets in orders of their own: every set is whole to the end, and
// the sum stays. Meanwhile others update the accounts one by one.
func TestReservedTransfers(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		for _, replicas := range []int{1, 2} {
			t.Run(transport+map[int]string{1: "", 2: ",replicas"}[replicas], func(t *testing.T) {
				cluster := testcluster.New(t, testcluster.Options{Nodes: replicas})
				maker := cluster.Connect(client.Config{Transport: transport})
				refs := accounts(t, maker, 5, replicas)
				ctx := t.Context()
				var wg sync.WaitGroup
				for g := range 3 {
					c := cluster.Connect(client.Config{Transport: transport})
					wg.Go(func() {
						for i := range 40 {
							from, to := refs[(g+i)%5], refs[(2*g+3*i+1)%5]
							if from == to {
								continue
							}
							if err := transfer(ctx, c, from, to, int64(i)); err != nil {
								t.Error(err)
								return
							}
							if err := c.Update(ctx, refs[i%5], func(old []byte) ([]byte, error) { return account(amount(old) + 1), nil }); err != nil {
								t.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				h, err := maker.Reserve(ctx, refs...)
				require.NoError(t, err)
				sum := int64(0)
				for _, ref := range refs {
					b, err := h.Read(ref, nil)
					require.NoError(t, err)
					sum += amount(b)
				}
				require.NoError(t, h.Release())
				require.EqualValues(t, updates(), sum)
			})
		}
	}
}

// updates counts the single updates of TestReservedTransfers.
func updates() (n int64) {
	for g := range 3 {
		for i := range 40 {
			if (g+i)%5 != (2*g+3*i+1)%5 {
				n++
			}
		}
	}
	return n
}

// transfer moves an amount from one account to another.
func transfer(ctx context.Context, c *client.Client, from, to client.Ref, n int64) error {
	h, err := c.Reserve(ctx, from, to)
	if err != nil {
		return err
	}
	a, err1 := h.Read(from, nil)
	b, err2 := h.Read(to, nil)
	if err := errors.Join(err1, err2); err != nil {
		return errors.Join(err, h.Release())
	}
	errs := h.WriteMany(ctx, []client.Ref{from, to}, [][]byte{account(amount(a) - n), account(amount(b) + n)})
	return errors.Join(errs[0], errs[1], h.Release())
}

// While a set is held other writers wait, readers do not, and a writer that has no time left gives back what it has.
func TestOthersWaitForAHeldSet(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{})
			c, other := cluster.Connect(client.Config{Transport: transport}), cluster.Connect(client.Config{Transport: transport})
			ctx := t.Context()
			refs := accounts(t, c, 3, 1)
			slices.SortFunc(refs, func(a, b client.Ref) int { return int(int64(a.Addr) - int64(b.Addr)) })
			h, err := c.Reserve(ctx, refs[1], refs[1])
			require.NoError(t, err)
			require.NoError(t, h.Write(ctx, refs[1], account(7)))
			b, err := other.Read(ctx, refs[1], nil)
			require.NoError(t, err)
			require.EqualValues(t, 7, amount(b))

			session := other.SessionID()
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, other.Write(short, refs[1], account(8)), context.DeadlineExceeded)
			_, err = other.Reserve(short, refs...)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			for range 3 {
				short, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
				defer cancel()
				_, err = other.Reserve(short, refs...)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.NotErrorIs(t, err, client.ErrUnknown)
			}
			require.NoError(t, c.Write(ctx, refs[0], account(1)), "it was given back")
			require.NoError(t, c.Write(ctx, refs[2], account(1)))
			require.Equal(t, session, other.SessionID())

			require.NoError(t, h.Release())
			require.NoError(t, h.Release())
			_, err = h.Read(refs[1], nil)
			require.ErrorIs(t, err, client.ErrArgument)
			require.ErrorIs(t, h.Write(ctx, refs[1], nil), client.ErrArgument)
			require.NoError(t, other.Write(ctx, refs[1], account(8)))
		})
	}
}

// What cannot be reserved is named, and nothing is.
func TestReserveRefuses(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c := cluster.Connect(client.Config{Lanes: 2})
	ctx := t.Context()
	refs := accounts(t, c, 3, 1)
	once, err := c.Alloc(ctx, account(0), client.AllocOptions{WriteOnce: true})
	require.NoError(t, err)
	large, err := c.Alloc(ctx, make([]byte, 4<<20), client.AllocOptions{})
	require.NoError(t, err)
	gone, err := c.Alloc(ctx, account(0), client.AllocOptions{})
	require.NoError(t, err)
	require.NoError(t, c.Free(ctx, gone))
	for _, x := range []struct {
		ref client.Ref
		err error
	}{{once, client.ErrImmutable}, {large, client.ErrTooLarge}, {gone, client.ErrFreed}, {client.Ref{}, client.ErrNoRegion}} {
		_, err := c.Reserve(ctx, refs[0], x.ref, refs[1])
		require.ErrorIs(t, err, x.err)
		require.ErrorContains(t, err, x.ref.String())
		require.NotErrorIs(t, err, client.ErrUnknown)
	}
	_, err = c.Reserve(ctx)
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = c.Reserve(ctx, make([]client.Ref, client.MaxHeld+1)...)
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = cluster.Connect(client.Config{ReadOnly: true}).Reserve(ctx, refs[0])
	require.ErrorIs(t, err, client.ErrReadOnly)

	// One of two lanes holds a set. The next one waits, and other calls go on.
	h, err := c.Reserve(ctx, refs[0], refs[1])
	require.NoError(t, err)
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, err = c.Reserve(short, refs[2])
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "Config.Lanes")
	require.NoError(t, c.Write(ctx, refs[2], account(3)))
	require.ErrorIs(t, h.Write(ctx, refs[2], account(4)), client.ErrArgument)
	require.ErrorIs(t, h.Write(ctx, refs[1], make([]byte, 1000)), client.ErrTooLarge)
	errs := h.WriteMany(ctx, []client.Ref{refs[0], refs[0]}, make([][]byte, 2))
	require.ErrorIs(t, errs[1], client.ErrArgument)
	errs = h.WriteMany(ctx, refs[:1], nil)
	require.ErrorIs(t, errs[0], client.ErrArgument)
	require.NoError(t, h.Write(ctx, refs[1], account(5)))
	require.NoError(t, h.Release())
	h, err = c.Reserve(ctx, refs[2])
	require.NoError(t, err)
	require.NoError(t, h.Release())
}

// A failover does not wait for the holder of a set. It loses its reservations, changes nothing any more, and Release says so.
func TestFailoverUnderAHeldSet(t *testing.T) {
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		t.Run(transport, func(t *testing.T) {
			cluster := testcluster.New(t, testcluster.Options{Nodes: 2})
			c, other := cluster.Connect(client.Config{Transport: transport}), cluster.Connect(client.Config{Transport: transport})
			ctx := t.Context()
			refs := accounts(t, c, 2, 2)
			h, err := c.Reserve(ctx, refs...)
			require.NoError(t, err)
			require.NoError(t, h.Write(ctx, refs[0], account(1)))
			require.NoError(t, cluster.Nodes[0].Close())
			require.NoError(t, other.Update(ctx, refs[0], func(old []byte) ([]byte, error) { return account(amount(old) + 10), nil }))
			err = h.Write(ctx, refs[1], account(2))
			require.ErrorIs(t, err, client.ErrHoldLost)
			require.NotErrorIs(t, err, client.ErrUnknown)
			require.ErrorIs(t, h.Release(), client.ErrHoldLost)
			for i, want := range []int64{11, 0} {
				b, err := c.Read(ctx, refs[i], nil)
				require.NoError(t, err)
				require.Equal(t, want, amount(b))
			}
			require.NoError(t, transfer(ctx, c, refs[0], refs[1], 1))
		})
	}
}

// The session of a holder ends: what it has reserved is given to others behind its fence.
func TestSessionEndsUnderAHeldSet(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{})
	c, other := cluster.Connect(client.Config{}), cluster.Connect(client.Config{})
	ctx := t.Context()
	refs := accounts(t, c, 2, 1)
	h, err := c.Reserve(ctx, refs...)
	require.NoError(t, err)
	require.NoError(t, h.Write(ctx, refs[0], account(1)))
	client.Suspend(c, 10*time.Second)
	require.NoError(t, transfer(ctx, other, refs[0], refs[1], 1))
	err = h.Write(ctx, refs[1], account(2))
	require.ErrorIs(t, err, client.ErrHoldLost)
	require.ErrorIs(t, err, client.ErrFenced)
	require.NotErrorIs(t, err, client.ErrUnknown)
	err = h.Release()
	require.ErrorIs(t, err, client.ErrHoldLost)
	require.ErrorIs(t, err, client.ErrFenced)
	b, err := c.Read(ctx, refs[1], nil)
	require.NoError(t, err)
	require.EqualValues(t, 1, amount(b))
	h, err = c.Reserve(ctx, refs...)
	require.NoError(t, err)
	require.NoError(t, h.Release())
}
