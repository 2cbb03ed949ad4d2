package storagenode

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
)

// TestTenantsShareFunctions: a tenant that has as many places, calls and requests for one object as it may leaves the others theirs.
func TestTenantsShareFunctions(t *testing.T) {
	var f functions
	offer := func(tenant uint32, serial, place uint64) error {
		return f.offer(&rdma.Ticket{Tenant: tenant, Serial: serial}, placeID{serial, place}, &msg.WorkerRequest{Any: true})
	}
	places := 0
	for err := error(nil); err == nil; places++ {
		err = offer(1, uint64(1+places/16), uint64(places))
	}
	require.Equal(t, maxPlaces/tenantShare+1, places, "the last one is refused")
	require.NoError(t, offer(1, 1, 0), "a place that it has")
	require.NoError(t, offer(2, 1000, 0), "another tenant")

	put := func(tenant uint32) *msg.ObjectAnswer {
		return f.put(&call{Taken: msg.Taken{Function: "f"}, tenant: tenant, until: clock.In(maxCall)})
	}
	for range maxCalls / tenantShare {
		require.Nil(t, put(1))
	}
	require.Equal(t, msg.Busy, put(1).Reason)
	require.Nil(t, put(2), "another tenant")

	first, again, other := f.enter(1), f.enter(1), f.enter(2)
	require.Same(t, first, again)
	require.True(t, first.enter(8, 0, clock.Now()))
	require.False(t, again.enter(8, 0, clock.Now()), "another call has the turn")
	first.waiting = maxWaiting
	require.True(t, other.enter(9, 0, clock.Now()), "a queue of its own")
	other.leave(9)
	f.leave(1)
	require.Len(t, f.turns, 2)
	f.leave(1)
	f.leave(2)
	require.Empty(t, f.turns, "what is left")
}

// TestAPlaceOutlivesConnections: a worker whose connection breaks again and again has one place for it, not one for each connection.
func TestAPlaceOutlivesConnections(t *testing.T) {
	var f functions
	for range 100 {
		require.NoError(t, f.offer(&rdma.Ticket{Serial: 1}, placeID{1, 5}, &msg.WorkerRequest{Any: true}))
	}
	require.Len(t, f.places, 1)
	require.NoError(t, f.offer(&rdma.Ticket{Serial: 2}, placeID{2, 5}, &msg.WorkerRequest{Any: true}))
	f.left(1)
	require.Len(t, f.places, 1, "those of another session")
}

// TestCallsGoWhereTheFunctionIs: a worker that serves all modules gets no call of a function that another worker has compiled in, until that worker
// has left.
func TestCallsGoWhereTheFunctionIs(t *testing.T) {
	var f functions
	own, stock, answer := placeID{1, 0}, placeID{2, 0}, make([]byte, msg.SlotBytes)
	require.NoError(t, f.offer(&rdma.Ticket{Serial: 1}, own, &msg.WorkerRequest{Any: true, Names: []string{"lengths"}}))
	require.NoError(t, f.offer(&rdma.Ticket{Serial: 2}, stock, &msg.WorkerRequest{Any: true, Names: []string{"add", "words"}}))
	taken := func(id placeID) (function string) {
		n, err := f.take(id, maxTake, answer)
		var held *host.Held
		if errors.As(err, &held) {
			return ""
		}
		require.NoError(t, err)
		got, _, err := msg.ParseTaken(answer[:n])
		require.NoError(t, err)
		return got.Function
	}
	put := func(function string) {
		require.Nil(t, f.put(&call{Taken: msg.Taken{Function: function}, until: clock.In(maxCall)}))
	}
	put("add")
	require.Empty(t, taken(own), "it has no add")
	require.Equal(t, "add", taken(stock))
	put("module")
	require.Equal(t, "module", taken(own), "no place lists it: any may have it")

	put("add")
	for len(f.places[own].ready) > 0 {
		<-f.places[own].ready
	}
	require.NoError(t, f.offer(&rdma.Ticket{Serial: 2}, stock, &msg.WorkerRequest{Any: true, Names: []string{"words"}}), "offers again, without add")
	require.Empty(t, f.listed[offered{0, "add"}])
	f.left(2)
	require.Len(t, f.places[own].ready, 1, "a call may be for it now")
	require.Equal(t, "add", taken(own), "it answers that there is none")
	require.Equal(t, map[offered]int{{0, "lengths"}: 1}, f.listed)
}
