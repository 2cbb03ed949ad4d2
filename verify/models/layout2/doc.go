// Package layout2 explores the two protocols of memory layout 2, staged slabs and open
// words, before the engine uses them (docs/LAYOUT2.md).
//
// The model is one slab on up to three replicas, with sessions that reserve, update, die,
// take over, roll back and give up, a reader whose READs come one word at a time in any order,
// and, as a Config asks, a shadow, frees and births, a replica that joins, a failover, a loss
// of power. A state is a value; the steps of a state are all verbs that may execute next.
// Explore visits every reachable state; Walk follows random schedules where there are too
// many. Every history is checked for linearizability, and every state for the invariants of
// docs/LAYOUT2.md.
//
// The package has no product code.
package layout2
