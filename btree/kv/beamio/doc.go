// Package beamio reads and writes trees in pipelines of Apache Beam. It is a module of its own, because of Beam's
// dependencies.
//
//	lines := beamio.Read(s, beamio.Source{Tree: "lines"})       // PCollection<KV<[]byte, []byte>>
//	beamio.Write(s, beamio.Sink{Tree: "counts"}, counts)        // of the same type
//
// A Source is read in the ranges that kv.Tree.Splits cuts the tree into, and a runner may split a range further while it
// is read. Each key that is in the tree all the time is read once, with a value that it had at some moment: a tree is read
// while it changes.
//
// A Sink puts each entry; to put it again changes nothing, so a runner may repeat a bundle. A bundle that the runner has
// given up, and that goes on elsewhere, puts later what it has: pipelines whose entries depend on where and when they run, and
// programs that change the same keys, see that.
package beamio
