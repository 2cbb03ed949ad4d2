package state

import "github.com/quarrystore/quarry/proto/quarrypb"

// defaultReplicas is how many replicas regions get whose request names no number: what an operator
// has chosen, else 2 where nodes lie in two failure domains. Nodes that are only silent
// count: their loss must not lower what is made meanwhile.
func (m *Machine) defaultReplicas() uint32 {
	if n := m.cluster.DefaultReplicas; n != 0 {
		return n
	}
	first := ""
	for _, n := range m.nodes {
		switch {
		case n.rec.State == nodeDown:
		case first == "":
			first = hostOf(n)
		case hostOf(n) != first:
			return 2
		}
	}
	return 1
}

// setDefaults changes the cluster's defaults, and answers with those that hold from now on.
func (m *Machine) setDefaults(waiter uint64, r *quarrypb.SetDefaultsRequest) {
	if r.Replicas != nil {
		if *r.Replicas > MaxReplicas {
			m.fail(waiter, errorf(Invalid, "%d replicas: want 1 to %d, or 0 for what the failure domains allow", *r.Replicas, MaxReplicas))
			return
		}
		if m.cluster.DefaultReplicas != *r.Replicas {
			c := m.editCluster()
			c.DefaultReplicas = *r.Replicas
			m.putCluster(c)
			m.note("regions and objects get %d replicas by default", m.defaultReplicas())
		}
	}
	m.answer(waiter, &quarrypb.SetDefaultsResponse{Replicas: m.defaultReplicas(), Chosen: m.cluster.DefaultReplicas != 0})
}
