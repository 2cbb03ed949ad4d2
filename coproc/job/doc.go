// Package job runs plugins over what a cluster holds. There is no coordinator:
// jobs and their parts are records of a tree (StateTree), and every change of one
// is a compare-and-swap by version, so that any worker can do the next step, and a job
// continues when a worker dies.
//
//	job/ID            what to do, and the phase it is in
//	active/ID         jobs that have not ended; the value is the priority
//	part/ID/PHASE/N   one part: pending -> running -> done, or failed
//	input/ID/N        objects that a map part reads, if there are many
//	runs/ID/PHASE/N/ATTEMPT manifest: the objects of runs that an attempt has made
//	worker/NAME       a live worker, and its plugins
//
// A worker runs beside a storage node and prefers parts whose memory that node
// holds. It raises a part's beat while it works. Another worker that has seen the same beat
// for a lease, by its own clock, may take the part over. The former owner finds out at its
// next beat, or when it records its result: only one result is ever recorded. So a part may
// run more than once, and its output must be the same each time.
//
// Invariant: one attempt of a part can change memory at a time. An attempt begins with the swap of the part's record
// that names its session, and changes memory under that session alone (client.Bind); whoever swaps the record
// later, to begin another attempt or to free what this one has left, first has the controllers certify that the
// session is fenced, or has seen the attempt return. A part is done with the swap that says so; a job, with the swap
// of its record after all its parts.
//
// With Spec.Replace the parts write a tree that kv.Stage has put beside the output, and a last phase of one part
// commits it. The tree that the output's name does not stand for is freed when the job has ended: kv.Settle.
//
// Between map and reduce records go through the store itself, as sorted runs in
// write-once objects, one list of them for each reduce part.
package job
