package redis

import (
	"cmp"

	"github.com/quarrystore/quarry/verify/redismodel"
)

// addClash adds the clients of a clash, and returns how many.
func (sc *schedule) addClash(r *rig, g *redismodel.Script, family string) int {
	clash := g.Clash(family)
	for i, script := range clash.Clients {
		a := sc.add(r.trees[i])
		if a.script = script; i == 0 {
			for n, key := range clash.Filled {
				sc.put(a, family, key, n, redismodel.Fields)
			}
		}
	}
	return len(clash.Clients)
}

// usual is how many operations on the tree a command makes where no other command changes
// its keys, and its gateway removes what it has replaced.
var usual = map[string]int{"COPY": 14, "RENAME": 17, "RENAMENX": 17, "DEL": 8, "GET": 1, "HGET": 3}

// stops runs each client up to one of its operations, mostly one of its last command, then one
// client to its end, and then all in random order. The clients reach their operations in the
// order of the clash three times of four.
func (sc *schedule) stops() func(ready []*actor) *actor {
	rnd := sc.rnd
	type stop struct{ command, operation int }
	stops := make([]stop, len(sc.actors))
	var order []int
	for i, a := range sc.actors {
		if a.script != nil {
			at := len(a.script) - 1
			if rnd.IntN(4) == 0 {
				at = rnd.IntN(len(a.script))
			}
			most := cmp.Or(usual[a.script[at][0]], 6)
			stops[i] = stop{at, 1 + rnd.IntN(most)}
			order = append(order, i)
		}
	}
	runner := sc.actors[rnd.IntN(len(order))]
	if rnd.IntN(4) == 0 {
		rnd.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	return func(ready []*actor) *actor {
		for len(order) > 0 {
			a, s := sc.actors[order[0]], stops[order[0]]
			if !a.done && (a.at < s.command || a.at == s.command && a.made < s.operation) {
				return a
			}
			order = order[1:]
		}
		if !runner.done {
			return runner
		}
		return ready[rnd.IntN(len(ready))]
	}
}
