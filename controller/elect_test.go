package controller

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestElector: when a member campaigns, and when not.
func TestElector(t *testing.T) {
	const gap = int64(electGap)
	gone := func(self uint64, now int64, lead uint64, heard ...uint64) votes {
		return votes{now: now, self: self, voters: []uint64{1, 2, 3}, lead: lead, heard: heard, gone: true}
	}
	answers := func(v votes) votes { v.gone = false; return v }
	for name, c := range map[string]struct {
		looks []votes
		want  []bool
	}{
		"the first of the living at once":     {[]votes{gone(1, 1, 3, 2)}, []bool{true}},
		"the second after the gap":            {[]votes{gone(2, 1, 3, 1), gone(2, gap, 3, 1), gone(2, 1+gap, 3, 1)}, []bool{false, false, true}},
		"the second sees the first one lead":  {[]votes{gone(2, 1, 3, 1), answers(gone(2, 1+gap, 1, 1))}, []bool{false, false}},
		"a candidate again after the other":   {[]votes{gone(1, 1, 3, 2), gone(1, 2*gap, 0, 2), gone(1, 1+2*gap, 0, 2)}, []bool{true, false, true}},
		"not while the leader answers":        {[]votes{answers(gone(1, 1, 3, 2)), answers(gone(1, gap, 0, 2))}, []bool{false, false}},
		"not without a majority":              {[]votes{gone(1, 1, 3), gone(1, 9*gap, 0)}, []bool{false, false}},
		"the one that is gone is no majority": {[]votes{gone(1, 1, 3, 3)}, []bool{false}},
		"not the leader itself":               {[]votes{gone(1, 1, 1, 2, 3)}, []bool{false}},
		"not without having known a leader":   {[]votes{gone(1, 1, 0, 2, 3)}, []bool{false}},
		"not a learner":                       {[]votes{gone(4, 1, 3, 1, 2)}, []bool{false}},
		"once when it looks late":             {[]votes{gone(2, 1, 3, 1), gone(2, 1+2*gap, 0, 1), gone(2, 2+2*gap, 0, 1)}, []bool{false, true, false}},
		"anew when the leader has answered":   {[]votes{gone(2, 1, 3, 1), answers(gone(2, 2, 3, 1)), gone(2, 2*gap, 3, 1)}, []bool{false, false, false}},
		"anew against another leader":         {[]votes{gone(2, 1, 3, 1), gone(2, 1+gap, 3, 1), gone(2, 2+gap, 1, 3)}, []bool{false, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			e, got := elector{}, []bool(nil)
			for _, v := range c.looks {
				got = append(got, e.step(v))
			}
			require.Equal(t, c.want, got)
		})
	}
	// Nobody has the turn of another one, and gaps double: slow members need them.
	for round := range maxCampaigns {
		for rank := range 2 {
			require.Equal(t, gap<<round, turn(round, rank+1, 3)-turn(round, rank, 3))
		}
		require.Equal(t, gap<<round, turn(round+1, 0, 3)-turn(round, 2, 3))
	}
	// What does not elect a leader is left to etcd's own timers in the end.
	e, n := elector{}, 0
	for now := int64(1); now < 100*gap; now += gap / 10 {
		if e.step(gone(1, now, 3, 2)) {
			n++
		}
	}
	require.Equal(t, maxCampaigns, n)
}
