// Package bench measures a cluster, and beside it, in the same run, what its
// figures are to be judged by: a cold memory copy with its checksum, a TCP ping-pong
// between two processes, and Redis where it is installed.
//
// Loops are closed: each client does one operation after the other, so a stall is
// one slow operation and not the many that would have come meanwhile. With
// Job.Rate the loop is open: operations have a time at which they are due, and
// latency counts from there.
//
// One clock reading an operation is part of what is measured (about 40 ns).
package bench
