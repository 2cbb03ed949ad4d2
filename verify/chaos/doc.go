// Package chaos hurts a cluster of real processes while clients work, and then
// checks their histories: no acknowledged change is lost, and no answer is wrong.
//
//	report, err := chaos.Run(ctx, chaos.Config{Binary: "bin/quarry", Self: exe, Duration: 5 * time.Minute})
//
// A run: three controllers and some storage nodes, each a process in a network
// namespace of its own, joined by veth links to a hub that routes; client
// processes on tcp and shm. Where namespaces cannot be made (no root), all run on
// the loopback, faults of the network are left out, and the report says so.
//
// Each client process writes every operation to a file: what it is about to
// change before it asks, what it was answered afterwards. A killed client's last
// change is one of unknown outcome. Every value is written once in all, so each
// read names the write that it saw.
//
// A part of the operations is on keys of a tree. Each client that works is also a Redis
// gateway to that tree, with connections of its own to it: their commands, on strings,
// counters, hashes and sorted sets, with RENAME, COPY and DEL across keys, are compared with
// package redismodel, a short time's keys at once. The gateways sweep what is older than two
// seconds, less than the time for which a client is stopped.
//
// A fault is injected, held, and healed, several times in a run. Then the
// clients end, a last one reads every object, fsck has to be clean with all
// replicas in sync, and the histories are checked object by object: with
// porcupine (keys of the tree like objects), and for acknowledged writes that nobody can find any more. The
// longest time in which no operation on some object succeeded is the gap.
//
// Worker is a client process. Programs that call Run must call it first thing
// in main when IsWorker says so: client processes are copies of the caller.
package chaos
