package state

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// answerAll answers the calls that are out: those that keep says stay, those to dead
// nodes fail, all others succeed.
func (r *rig) answerAll(keep func(Call) bool) {
	for {
		r.settle()
		i := slices.IndexFunc(r.calls, func(c Call) bool { return !keep(c) })
		if i < 0 {
			return
		}
		if c := r.calls[i]; r.dead[c.Node] {
			r.reply(c.ID, "timed out", false)
		} else {
			r.reply(c.ID, "", false)
		}
	}
}

// passAnswering lets time pass and answers calls as answerAll does.
func (r *rig) passAnswering(keep func(Call) bool, d time.Duration) {
	for end := r.now + int64(d); r.now < end; {
		r.advance(100 * time.Millisecond)
		r.answerAll(keep)
	}
}

func isClose(c Call) bool { _, ok := c.Msg.(*quarrypb.CloseRegionRequest); return ok }

// Hazards 4 and 11: a node that leaves a configuration without having acknowledged a
// fence counts until every survivor has closed the epoch that both served, however it
// leaves.
func TestHazard04_11_ALeavingNodeCountsUntilTheSurvivorsHaveClosed(t *testing.T) {
	lose := func(r *rig) {
		r.dead[1] = true
		r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Id == 1 })
		for range 60 {
			r.answerAll(isClose)
			r.advance(100 * time.Millisecond)
		}
	}
	for name, leave := range map[string]func(r *rig){
		"lost": lose,
		"removed": func(r *rig) {
			lose(r)
			r.ask(&quarrypb.RemoveNodeRequest{Name: "a", Force: true})
			r.answerAll(isClose)
		},
		"restarted": func(r *rig) {
			r.dead[1] = true
			w := r.join(testNode("a", "/dc/r1/a", 2))
			r.answerAll(isClose) // the ping of its former incarnation times out
			answerOf[*quarrypb.RegisterNodeResponse](r, w)
		},
		"restarted, the survivor silent": func(r *rig) {
			// Nothing is decided while b does not answer: the region stays as it is.
			r.dead[1], r.dead[2] = true, true
			r.beats = nil
			r.advance(2 * time.Second)
			w := r.join(testNode("a", "/dc/r1/a", 2))
			r.answerAll(isClose)
			answerOf[*quarrypb.RegisterNodeResponse](r, w)
			require.Equal(t, open, r.table().Regions[0].State)
			for range 10 {
				r.advance(100 * time.Millisecond)
				r.answerAll(isClose)
			}
			require.Len(t, r.m.fences.pending, 1, "the former incarnation has not acknowledged, and may go on")
			delete(r.dead, 1)
			delete(r.dead, 2)
			for range 40 {
				r.advance(100 * time.Millisecond)
				r.answerAll(isClose)
			}
		},
		"found recovering by a new leader": func(r *rig) {
			lose(r)
			require.Equal(t, recovering, r.table().Regions[0].State)
			r.start()
			for range 20 {
				r.answerAll(isClose)
				r.advance(100 * time.Millisecond)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := cluster(t)
			dead := r.open("dead")
			r.ask(&quarrypb.RevokeSessionRequest{Session: dead.Session})
			r.settle()
			for i := 0; i < len(r.calls); { // b has acknowledged, a does not
				if c := r.calls[i]; c.Node == 2 {
					r.reply(c.ID, "", false)
				} else {
					i++
				}
			}
			r.dead[1] = true
			certified := func() bool {
				asker := r.open("asker")
				w := r.ask(&quarrypb.CertifyFenceRequest{Serial: asker.Serial, Session: dead.Session, WaitMs: 1})
				r.answerAll(isClose)
				r.advance(100 * time.Millisecond)
				r.answerAll(isClose)
				return answerOf[*quarrypb.CertifyFenceResponse](r, w).Fenced
			}
			require.False(t, certified())
			leave(r)
			require.False(t, certified(), "b serves the epoch in which a may commit for the dead session")
			i := slices.IndexFunc(r.calls, func(c Call) bool { return isClose(c) && c.Node == 2 })
			require.GreaterOrEqual(t, i, 0, "%s", strings.Join(r.notes, "\n"))
			r.reply(r.calls[i].ID, "", false)
			require.True(t, certified())
		})
	}
}
