package msg

// Procedures by their numbers on the wire. This list gives the numbers, and docs/PROTOCOL.md repeats it: a new procedure takes
// the next free one, and no number is ever given to another procedure.
//
//	1  Echo      every node
//	2  Allocate  kept for slabs that the node allocates
//	3  Object    objects that the node reads, writes, frees and releases
//	4            kept
//	5            kept for ranges that the node flushes
//	6            kept; chains with atomics go as messages on the queue pair, where the adapter has none
//	7            kept for checksums of ranges
//	8            kept for the table and the names
//	9  Watch     notifications
//	10 Worker    workers that call functions on objects
//
// Numbers from 100 on are of tests.
const (
	// Echo answers what it was asked.
	Echo = 1
)
