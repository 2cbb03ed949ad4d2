package state

import "github.com/quarrystore/quarry/proto"

// outcome of a program.
type outcome uint8

const (
	idle outcome = iota
	running
	done
	failed
)

// work is the last program of its kind over a region.
type work struct {
	id, epoch uint64
	run       uint64 // of those begun: one that was replaced may end when another of its id runs
	state     outcome
}

// work begins a program, or joins the one that is asked for again: calls come twice,
// and a controller that has just begun to lead repeats those of the one before.
func (s *State) work(e Work) ([]Action, error) {
	r := s.Region(e.Region)
	switch {
	case e.Kind == 0 || e.Kind >= kinds:
		return nil, errorf(Invalid, "region %d: unknown work %d", e.Region, e.Kind)
	case r == nil:
		return nil, errorf(NotHosted, "region %d is not on this node", e.Region)
	case r.Kind == proto.RegionRaw && e.Kind == Reclaim:
		return nil, errorf(Invalid, "region %d holds plain bytes: there is nothing to reclaim", r.Number)
	case r.Busy:
		return nil, busy(r)
	case r.Phase != Opened || r.Epoch != e.Epoch:
		return nil, errorf(Stale, "region %d: %v of epoch %d, the node has it %v at epoch %d", r.Number, e.Kind, e.Epoch, r.Phase, r.Epoch)
	}
	w := &r.works[e.Kind]
	if w.id == e.ID && w.epoch == e.Epoch && (w.state == running || w.state == done) {
		return nil, nil
	}
	if w.epoch == e.Epoch && e.ID < w.id {
		return nil, errorf(Stale, "region %d: %v %d, the node has been asked for %d since", r.Number, e.Kind, e.ID, w.id)
	}
	s.runs++
	*w = work{id: e.ID, epoch: e.Epoch, run: s.runs, state: running}
	return []Action{{Do: Begin, Region: r.Number, Epoch: e.Epoch, Kind: e.Kind, ID: e.ID, Run: s.runs}}, nil
}

// workEnded takes the end of a program, unless another run has taken its place.
func (s *State) workEnded(e WorkEnded) {
	r := s.Region(e.Region)
	if r == nil || e.Kind == 0 || e.Kind >= kinds {
		return
	}
	w := &r.works[e.Kind]
	if w.run != e.Run || w.state != running {
		return // another has taken its place
	}
	w.state = done
	if e.Failed {
		w.state = failed
	}
}

// stop ends the programs over a region whose access changes.
func (r *Region) stop() []Action {
	stops := false
	for k := range r.works {
		stops = stops || r.works[k].state == running
		r.works[k] = work{}
	}
	if !stops {
		return nil
	}
	return []Action{{Do: Stop, Region: r.Number}}
}
