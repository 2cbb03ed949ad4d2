package state

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	wire "github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Hazard 31: an id is not handed out again while anything may name it.
func TestHazard31_SessionIdsAreNotReused(t *testing.T) {
	r := cluster(t)
	// Four ids in all, so that every reuse there can be happens.
	for id := uint32(5); id <= wire.MaxSession; id++ {
		r.m.ids.used[id/64] |= 1 << (id % 64)
	}
	var tickets []*quarrypb.Ticket
	for range 4 {
		tickets = append(tickets, r.open("first"))
	}
	full := func() {
		w := r.ask(&quarrypb.OpenSessionRequest{})
		r.settle()
		require.Equal(t, Exhausted, r.refusal(w).Code)
	}
	full()
	victim := tickets[2]
	w := r.ask(&quarrypb.RevokeSessionRequest{Session: victim.Session})
	full() // fencing
	r.settle()
	r.reply(r.calls[0].ID, "", false)
	full() // half fenced
	require.False(t, r.answered(w))
	r.run()
	answerOf[*quarrypb.RevokeSessionResponse](r, w)
	full() // fenced, not scrubbed

	w = r.ask(Scrubbed{Serials: []uint64{victim.Serial}})
	require.Equal(t, Precondition, r.refusal(w).Code, "its lease protects what it has read")
	w = r.ask(Scrubbed{Serials: []uint64{tickets[0].Serial}})
	require.Equal(t, Precondition, r.refusal(w).Code, "a live session")

	// Nor does a new leader forget who had the id.
	r.start()
	for id := uint32(5); id <= wire.MaxSession; id++ {
		r.m.ids.used[id/64] |= 1 << (id % 64)
	}
	full()
	r.up(testNode("a", "/dc/r1/a", 1))
	for range 20 {
		for _, i := range []int{0, 1, 3} {
			r.ask(&quarrypb.HeartbeatRequest{Serial: tickets[i].Serial})
		}
		r.advance(200 * time.Millisecond)
	}
	r.run()
	w = r.ask(Scrubbed{Serials: []uint64{victim.Serial}})
	r.settle()
	// A takeover of what the victim had reserved may still be under way: in a call
	// that began before, or in one whose session has not acknowledged a later reclaim epoch.
	epoch := r.table().ReclaimEpoch
	for i, ack := range map[int]uint64{0: epoch, 1: epoch, 3: epoch - 1} {
		r.ask(&quarrypb.HeartbeatRequest{Serial: tickets[i].Serial, ReclaimEpoch: ack})
	}
	r.run()
	full()
	require.False(t, r.answered(w))
	r.ask(&quarrypb.HeartbeatRequest{Serial: tickets[3].Serial, ReclaimEpoch: epoch})
	r.run()
	answerOf[Done](r, w)
	again := r.open("second")
	require.Equal(t, victim.Session, again.Session)
	require.Greater(t, again.Serial, tickets[3].Serial, "serials are never used twice")
}

// A session that is closed in good order leaves no reservation, but an operation that has
// met one before may still be about to take it over: its id rests until every session has
// acknowledged a reclaim epoch raised since.
// Ended sessions that wait for a scrub take all ids that clients get: the agents' programs
// still get sessions, so that the scrub comes.
func TestHazard31_AgentsHaveIdsLeft(t *testing.T) {
	r := cluster(t)
	r.m.ids.reserve(8)
	for range 6 {
		r.ask(&quarrypb.RevokeSessionRequest{Session: r.open("client").Session})
		r.run()
	}
	w := r.ask(&quarrypb.OpenSessionRequest{Name: "client"})
	r.settle()
	require.Equal(t, Exhausted, r.refusal(w).Code)
	for range 2 {
		w := r.ask(&quarrypb.OpenSessionRequest{Name: "scrub", Agent: true})
		r.settle()
		answerOf[*quarrypb.OpenSessionResponse](r, w)
	}
}

func TestHazard31_IdsOfClosedSessionsRest(t *testing.T) {
	r := cluster(t)
	for id := uint32(3); id <= wire.MaxSession; id++ {
		r.m.ids.used[id/64] |= 1 << (id % 64)
	}
	taker, closed := r.open("taker"), r.open("closed")
	w := r.ask(&quarrypb.CloseSessionRequest{Serial: closed.Serial})
	r.run()
	answerOf[*quarrypb.CloseSessionResponse](r, w)
	refused := func() {
		w := r.ask(&quarrypb.OpenSessionRequest{})
		r.run()
		require.Equal(t, Exhausted, r.refusal(w).Code)
	}
	epoch := r.table().ReclaimEpoch
	refused()
	require.Equal(t, epoch+1, r.table().ReclaimEpoch, "there is no other id: the epoch is raised for it")
	refused()
	require.Equal(t, epoch+1, r.table().ReclaimEpoch)
	r.ask(&quarrypb.HeartbeatRequest{Serial: taker.Serial, ReclaimEpoch: epoch})
	r.run()
	refused()
	r.ask(&quarrypb.HeartbeatRequest{Serial: taker.Serial, ReclaimEpoch: epoch + 1})
	r.run()
	require.Equal(t, closed.Session, r.open("next").Session)
}

// An id that rests when the leader changes is not given out by the next leader. Once the ids
// have been used up, the next one in order may be that of a session closed a moment ago.
func TestHazard31_IdsRestOverAChangeOfLeader(t *testing.T) {
	r := cluster(t)
	r.ids = 8
	r.start()
	r.settle()
	live := map[uint64]bool{}
	beat := func() {
		for serial := range live {
			r.ask(&quarrypb.HeartbeatRequest{Serial: serial, ReclaimEpoch: r.table().ReclaimEpoch})
		}
		r.run()
	}
	open := func() *quarrypb.Ticket { // nil: no id is free
		w := r.ask(&quarrypb.OpenSessionRequest{Agent: true})
		r.run()
		if r.answers[w].Err != nil {
			require.Equal(t, Exhausted, r.refusal(w).Code)
			return nil
		}
		ticket := answerOf[*quarrypb.OpenSessionResponse](r, w).Ticket
		live[ticket.Serial] = true
		return ticket
	}
	end := func(ticket *quarrypb.Ticket) {
		w := r.ask(&quarrypb.CloseSessionRequest{Serial: ticket.Serial})
		r.run()
		answerOf[*quarrypb.CloseSessionResponse](r, w)
		delete(live, ticket.Serial)
	}
	for r.m.cluster.NextSerial <= 20 { // the ids are used up more than once
		if ticket := open(); ticket != nil {
			end(ticket)
		}
		beat()
	}
	var last *quarrypb.Ticket
	for tries := 0; tries < 20; tries++ {
		if ticket := open(); ticket != nil {
			last = ticket
		}
		beat()
	}
	require.Len(t, live, 8, "every id is in use")
	end(last)
	require.Nil(t, open())
	r.start()
	r.run()
	require.Nil(t, open(), "an operation from before the close may still name the id")
	for tries := 0; tries < 5; tries++ {
		beat()
	}
	require.Equal(t, last.Session, open().Session)
	require.Len(t, r.m.sessions, 8, "no record of a closed session is left")
}

// However many scrubs end while one session does not acknowledge, one wait stands for
// the first, and one for all the others.
func TestScrubbedSessionsRetireTogether(t *testing.T) {
	r := cluster(t)
	slow := r.open("slow")
	var dead []*quarrypb.Ticket
	for range 5 {
		dead = append(dead, r.open("dead"))
	}
	for _, d := range dead {
		w := r.ask(&quarrypb.RevokeSessionRequest{Session: d.Session})
		r.run()
		answerOf[*quarrypb.RevokeSessionResponse](r, w)
	}
	for range 20 { // until the leases of the dead are over
		r.ask(&quarrypb.HeartbeatRequest{Serial: slow.Serial})
		r.advance(200 * time.Millisecond)
	}
	epoch := r.table().ReclaimEpoch
	var asked []uint64
	for _, d := range dead {
		asked = append(asked, r.ask(Scrubbed{Serials: []uint64{d.Serial}}))
		r.run()
	}
	require.Equal(t, epoch+1, r.table().ReclaimEpoch)
	require.Len(t, r.m.waits.list, 1)
	r.ask(&quarrypb.HeartbeatRequest{Serial: slow.Serial, ReclaimEpoch: epoch + 1})
	r.run()
	answerOf[Done](r, asked[0])
	require.False(t, r.answered(asked[1]))
	require.Equal(t, epoch+2, r.table().ReclaimEpoch)
	r.ask(&quarrypb.HeartbeatRequest{Serial: slow.Serial, ReclaimEpoch: epoch + 2})
	r.run()
	for _, w := range asked[1:] {
		answerOf[Done](r, w)
	}
	require.Empty(t, r.m.waits.list)
}
