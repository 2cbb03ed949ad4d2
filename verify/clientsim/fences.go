package clientsim

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// fences checks every fence that is called complete: no node that serves an epoch of the
// present configuration still has a lane of the session. A node that has left a
// configuration counts for as long as one that stayed serves the same epoch: a client
// with the old table reaches both.
//
// It is told of what is committed and of what is answered. Its caller holds etcd.mu.
type fences struct {
	w        *World
	regions  map[uint32]*quarrypb.Region
	sessions map[string]*quarrypb.Session
	// told are the epochs that a table has called open: clients have keys of no other.
	told map[[2]uint64]bool
}

func newFences(w *World) *fences {
	return &fences{w: w, regions: map[uint32]*quarrypb.Region{}, sessions: map[string]*quarrypb.Session{}, told: map[[2]uint64]bool{}}
}

// committed takes a record; value is nil where it was deleted.
func (f *fences) committed(key string, value []byte) {
	_, name, _ := strings.Cut(strings.TrimPrefix(key, "/"), "/")
	kind, _, _ := strings.Cut(name, "/")
	switch kind {
	case "regions":
		r := &quarrypb.Region{}
		if value == nil || proto.Unmarshal(value, r) != nil {
			return // the regions that are left say all
		}
		f.regions[r.Id] = r
		if r.State == quarrypb.RegionState_REGION_STATE_OPEN {
			f.told[[2]uint64{uint64(r.Id), r.Epoch}] = true
		}
	case "sessions":
		s := &quarrypb.Session{}
		if value == nil || proto.Unmarshal(value, s) != nil {
			delete(f.sessions, key)
			return
		}
		f.sessions[key] = s
		if s.State == "fenced" {
			f.complete(s, 0)
		}
	}
}

// certified takes the answer to a CertifyFence: the fence is complete in one region.
func (f *fences) certified(session, region uint32) {
	for _, s := range f.sessions {
		if s.Session == session && s.State == "fencing" {
			f.complete(s, region)
		}
	}
}

// complete checks a fence in a region; 0: in all.
func (f *fences) complete(s *quarrypb.Session, region uint32) {
	w := f.w
	w.count(&w.Counts.Fences)
	serving := f.serving()
	for _, l := range w.hosts() {
		lanes := 0
		for _, st := range l.access.Sessions() {
			if st.Serial == s.Serial {
				lanes = len(st.Providers)
			}
		}
		if lanes == 0 {
			continue
		}
		for _, g := range l.access.Regions() {
			if g.Open && serving[[2]uint64{uint64(g.Region), g.Epoch}] && (region == 0 || region == g.Region) {
				w.fail("the fence of session %d (serial %d) is complete while %s, which serves epoch %d of region %d, admits it: %s",
					s.Session, s.Serial, l.proc.Name, g.Epoch, g.Region, fmt.Sprint(f.regions[g.Region]))
				return
			}
		}
	}
}

// serving are the epochs that a replica of a present configuration serves to clients.
func (f *fences) serving() map[[2]uint64]bool {
	out := map[[2]uint64]bool{}
	for _, l := range f.w.hosts() {
		node, incarnation := l.access.Peer()
		for _, g := range l.access.Regions() {
			at := [2]uint64{uint64(g.Region), g.Epoch}
			r := f.regions[g.Region]
			if r == nil || !g.Open || !f.told[at] {
				continue
			}
			for _, p := range r.Replicas {
				if p.Node == node && p.Incarnation == incarnation && p.State != quarrypb.ReplicaState_REPLICA_STATE_OUT {
					out[at] = true
				}
			}
		}
	}
	return out
}

// hosts are the nodes whose processes have not died.
func (w *World) hosts() (out []*lent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.lent {
		out = append(out, l)
	}
	return out
}
