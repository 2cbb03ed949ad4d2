package layout2

import (
	"hash/maphash"
	"math/rand/v2"
)

// A Result says what a search has seen.
type Result struct {
	States    int      // distinct states, or steps of all walks
	Walks     int      // walks until the violation, or all
	Depth     int      // steps of the longest path, or of the violation
	Violation string   // empty if none was found
	Trace     []string // the steps to the violation
	Complete  bool     // every reachable state was visited
	Seen      map[string]int
}

// node is one visited state: how it was reached. Its path is replayed for a trace, so that
// states need not be kept.
type node struct {
	parent int32
	choice uint16
}

// seen is a set of 64-bit hashes of states. Two states with one hash would be taken for one:
// with n states the chance is n^2/2^65, 1e-5 for 20 million. The hash differs in each run.
type seen struct {
	slots []uint64
	used  int
}

func newSeen() *seen { return &seen{slots: make([]uint64, 1<<16)} }

func (s *seen) add(h uint64) bool {
	if h == 0 {
		h = 1
	}
	if s.used*4 > len(s.slots)*3 {
		old := s.slots
		s.slots, s.used = make([]uint64, 2*len(old)), 0
		for _, o := range old {
			if o != 0 {
				s.add(o)
			}
		}
	}
	mask := uint64(len(s.slots) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		switch s.slots[i] {
		case h:
			return false
		case 0:
			s.slots[i] = h
			s.used++
			return true
		}
	}
}

// Explore visits the states of a model breadth first, so that the trace of a violation is a
// shortest one. It gives up after limit states.
func Explore(c Config, limit int) Result {
	m := newModel(c)
	seed := maphash.MakeSeed()
	visited := newSeen()
	start := m.initial()
	visited.add(maphash.Comparable(seed, start))
	nodes := []node{{parent: -1}}
	level, next := []state{start}, []state(nil)
	first := 0 // node of level[0]
	res := Result{Seen: m.seen}
	for len(level) > 0 {
		res.Depth++
		for i := range level {
			choice := uint16(0)
			for _, st := range m.steps(&level[i]) {
				if st.violation != "" {
					res.States, res.Violation = len(nodes), st.violation
					res.Trace = append(m.replay(start, nodes, first+i), st.name)
					return res
				}
				if visited.add(maphash.Comparable(seed, st.to)) {
					nodes = append(nodes, node{int32(first + i), choice})
					next = append(next, st.to)
				}
				choice++
			}
		}
		first += len(level)
		level, next = next, level[:0]
		if len(nodes) > limit {
			res.States = len(nodes)
			return res
		}
	}
	res.States, res.Complete = len(nodes), true
	return res
}

// replay names the steps from the start to a node.
func (m *model) replay(start state, nodes []node, at int) []string {
	var choices []uint16
	for ; nodes[at].parent >= 0; at = int(nodes[at].parent) {
		choices = append(choices, nodes[at].choice)
	}
	var names []string
	s := start
	for i := len(choices) - 1; i >= 0; i-- {
		st := m.steps(&s)[choices[i]]
		names = append(names, st.name)
		s = st.to
	}
	return names
}

// Walk follows random schedules from a seed until one violates a rule, at most walks of them.
func Walk(c Config, seed uint64, walks int) Result {
	const longest = 600
	m := newModel(c)
	rng := rand.New(rand.NewPCG(seed, 1))
	res := Result{Seen: m.seen}
	for res.Walks = 1; res.Walks <= walks; res.Walks++ {
		s := m.initial()
		var names []string
		var slow [actors]int
		for i := range slow {
			slow[i] = 1 << (2 * rng.IntN(4))
		}
		for len(names) < longest {
			steps := m.steps(&s)
			if len(steps) == 0 {
				break
			}
			st := pick(rng, steps, &slow)
			res.States++
			m.seen[st.name]++
			names = append(names, st.name)
			if st.violation != "" {
				res.Violation, res.Trace, res.Depth = st.violation, names, len(names)
				return res
			}
			s = st.to
			if rng.IntN(8) == 0 {
				if res.Violation = m.checkReads(&s); res.Violation != "" {
					res.Trace, res.Depth = names, len(names)
					return res
				}
			}
			if s.over(m) {
				break
			}
		}
		res.Depth = max(res.Depth, len(names))
	}
	res.Walks--
	return res
}

// pick chooses the next step of a walk. Each actor has a speed of its own in a walk, so that a
// reader may sleep over several commits.
func pick(rng *rand.Rand, steps []step, slow *[actors]int) *step {
	const rarity = 10
	for range 1000 {
		st := &steps[rng.IntN(len(steps))]
		if rng.IntN(slow[st.actor]) == 0 && (!st.rare || rng.IntN(rarity) == 0) {
			return st
		}
	}
	return &steps[0]
}
