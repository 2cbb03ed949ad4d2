package state

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// suspectNode is a cluster in which node 1 is dead, and its first probe is under way.
func suspectNode(t *testing.T) *rig {
	r := newRig(t)
	r.settle()
	for _, name := range []string{"a", "b"} {
		r.up(testNode(name, "/dc/"+name+"/h", 1))
	}
	r.pass(time.Second)
	r.dead[1] = true
	r.step(Suspect{Node: 1, Incarnation: 1})
	return r
}

// fail answers the only probe with an error, and returns the probe that follows in the same step.
func (r *rig) fail(refused bool) *Call {
	require.Len(r.t, r.probes, 1)
	c := r.probes[0]
	r.probes = nil
	r.step(Reply{Call: c.ID, Err: errors.New("no answer"), NoListener: refused})
	if len(r.probes) == 0 {
		return nil
	}
	return &r.probes[0]
}

// Behind a probe whose connection was refused the next one does not wait for a tick: the kernel of the
// node's host has said that no process listens.
func TestRefusedProbesFollowSoon(t *testing.T) {
	r := suspectNode(t)
	require.Zero(t, r.probes[0].After)
	for range suspectProbes - 1 {
		require.False(t, r.m.node(1).lost)
		next := r.fail(true)
		require.NotNil(t, next)
		require.EqualValues(t, refusedGap, next.After)
	}
	require.Nil(t, r.fail(true))
	require.True(t, r.m.node(1).lost)
	require.Contains(t, r.notes[len(r.notes)-1], "node a (1) is lost: its host refused 3 connections in a row to http://a:1: no process listens there")
}

// A probe without any answer says nothing about the process: the next one waits.
func TestSilentProbesWait(t *testing.T) {
	r := suspectNode(t)
	require.NotNil(t, r.fail(true))
	require.Nil(t, r.fail(false), "the gap is as for every silent probe")
	r.now += int64(probeGap) - 1
	r.step(Tick{})
	require.Empty(t, r.probes)
	r.now++
	r.step(Tick{})
	require.Len(t, r.probes, 1)
	require.Nil(t, r.fail(true))
	require.True(t, r.m.node(1).lost)
	require.Contains(t, r.notes[len(r.notes)-1], "3 probes in a row without an answer")
}

// An answer between refused probes ends the suspicion: the next three have to fail anew.
func TestAnsweredProbeEndsTheRow(t *testing.T) {
	r := suspectNode(t)
	r.fail(true)
	require.NotNil(t, r.fail(true))
	r.dead[1] = false
	r.answerProbes()
	require.Zero(t, r.m.node(1).fails)
	require.False(t, r.m.node(1).lost)
	require.Empty(t, r.probes)
}
