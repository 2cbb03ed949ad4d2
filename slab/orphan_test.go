package slab

import (
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
)

// place is a cluster with one object, as a Survey sees it. After the call with number at the
// object's writer names the object and ends.
type place struct {
	object proto.Ref
	named  map[proto.Ref]bool
	over   bool
	calls  int
	at     int
}

const placeWriter = 5

func (p *place) called() {
	if p.calls++; p.calls == p.at {
		p.named[p.object], p.over = true, true
	}
}

func (p *place) Objects(saw func(Seen)) error {
	saw(Seen{Ref: p.object, Writer: placeWriter, Version: 1})
	p.called()
	return nil
}

func (p *place) Sessions() (func(uint32) SessionState, error) {
	over := p.over
	p.called()
	return func(id uint32) SessionState {
		if id != placeWriter || over {
			return SessionGone
		}
		return SessionLive
	}, nil
}

func (p *place) Named(met func(proto.Ref)) (bool, error) {
	for ref := range maps.Clone(p.named) {
		met(ref)
	}
	p.called()
	return true, nil
}

// TestOrphansAreNeverNamedAgain: the writer of an object names it and ends, at any moment of
// the survey. The object is no orphan; without a name it is one.
func TestOrphansAreNeverNamedAgain(t *testing.T) {
	ref := proto.Ref{Addr: proto.MakeAddr(1, 1<<20), Incarnation: proto.MakeIncarnation(0, 1)}
	for at := 1; at <= 3; at++ {
		t.Run(fmt.Sprintf("after call %d", at), func(t *testing.T) {
			p := &place{object: ref, named: map[proto.Ref]bool{}, at: at}
			orphans, done, err := Orphans(p)
			require.NoError(t, err)
			require.True(t, done)
			require.Equal(t, 3, p.calls)
			require.Empty(t, orphans)
		})
	}
	p := &place{object: ref, named: map[proto.Ref]bool{}, over: true}
	orphans, _, err := Orphans(p)
	require.NoError(t, err)
	require.Len(t, orphans, 1)
}
