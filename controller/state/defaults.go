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

// Quota of the bytes that all jobs may have between map and reduce.
const (
	shufflePart     = 4 // of the nodes' capacity: half of the memory, when runs are merged
	minShuffleBytes = 256 << 20
	maxShuffleBytes = 1 << 50
)

// shuffleBytes is the quota: what an operator has chosen, else a part of what the nodes hold. Nodes that are only silent count.
func (m *Machine) shuffleBytes() uint64 {
	if n := m.cluster.ShuffleBytes; n != 0 {
		return n
	}
	sum := uint64(0)
	for _, n := range m.nodes {
		if n.rec.State != nodeDown {
			sum += min(n.capacity(), maxShuffleBytes)
		}
	}
	return max(minShuffleBytes, sum/shufflePart/uint64(m.defaultReplicas()))
}

// setDefaults changes the cluster's defaults, and answers with those that hold from now on.
func (m *Machine) setDefaults(waiter uint64, r *quarrypb.SetDefaultsRequest) {
	switch {
	case r.Replicas != nil && *r.Replicas > MaxReplicas:
		m.fail(waiter, errorf(Invalid, "%d replicas: want 1 to %d, or 0 for what the failure domains allow", *r.Replicas, MaxReplicas))
		return
	case r.ShuffleBytes != nil && *r.ShuffleBytes > maxShuffleBytes:
		m.fail(waiter, errorf(Invalid, "a quota of %d bytes between map and reduce: want at most %d, or 0 for a part of what the nodes hold", *r.ShuffleBytes, uint64(maxShuffleBytes)))
		return
	}
	if r.Replicas != nil && m.cluster.DefaultReplicas != *r.Replicas {
		c := m.editCluster()
		c.DefaultReplicas = *r.Replicas
		m.putCluster(c)
		m.note("regions and objects get %d replicas by default", m.defaultReplicas())
	}
	if r.ShuffleBytes != nil && m.cluster.ShuffleBytes != *r.ShuffleBytes {
		c := m.editCluster()
		c.ShuffleBytes = *r.ShuffleBytes
		m.putCluster(c)
		m.note("jobs may have %s between map and reduce", bytesText(m.shuffleBytes()))
	}
	m.answer(waiter, &quarrypb.SetDefaultsResponse{Replicas: m.defaultReplicas(), Chosen: m.cluster.DefaultReplicas != 0, ShuffleBytes: m.shuffleBytes(), ShuffleChosen: m.cluster.ShuffleBytes != 0})
}
