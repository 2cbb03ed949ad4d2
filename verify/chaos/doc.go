// Package chaos injects faults into a cluster of real processes while clients work, and then
// checks their histories: no acknowledged change is lost, and no answer is wrong.
//
//	report, err := chaos.Run(ctx, chaos.Config{Binary: "bin/quarry", Self: exe, Duration: 5 * time.Minute})
//
// A run: three controllers and some storage nodes, each a process in a network
// namespace of its own, joined by veth links to a hub that routes; client
// processes on tcp and shm. Where namespaces cannot be made (no root), all run on
// the loopback, faults of the network are left out, and the report says so.
//
// Each client process writes every operation to a file: a change before it is requested, and
// the answer afterwards. The last change of a killed client has an unknown outcome. No value is
// written twice, so each read identifies the write that it saw.
//
// A part of the operations is on keys of a tree. Each client that works is also a Redis
// gateway to that tree, with connections of its own to it: their commands, on strings,
// counters, hashes and sorted sets, with RENAME, COPY and DEL across keys, are compared with
// package redismodel, in groups of keys that were used at the same time. The gateways sweep what
// is older than two seconds: less than the time for which a fault stops a client.
//
// One object is a counter that all of them add to at once, some by messages to the node of its primary (client.Config.HelpFromNodes):
// its number has to be that of the counts that were acknowledged, and of some of the unknown ones.
//
// A fault is injected, held, and healed, several times in a run. Then the
// clients end, a last one reads every object, fsck has to be clean with all
// replicas in sync, and the histories are checked object by object: with
// porcupine (keys of the tree like objects), and for lost writes: acknowledged changes that the last
// read does not show. The longest time in which no operation on some object succeeded is the gap.
//
// Worker is a client process. Client processes are copies of the calling program: its main must
// begin with a call of Worker where IsWorker is true.
package chaos
