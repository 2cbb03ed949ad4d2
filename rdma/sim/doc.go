// Package sim is the hostile fabric: every freedom that package rdma leaves to a
// provider is taken, by a seeded choice.
//
//   - Regions are Go-heap words, in pages made when touched.
//   - A chain is executed verb by verb, a READ or WRITE by grains in any order.
//   - A WRITE, CAS, FETCH_ADD or FLUSH without the fence flag may run before an
//     earlier READ, atomic or FLUSH of its chain; never before an earlier WRITE.
//   - Execution and completion are apart: a completion may be late or lost, and
//     what the requester has given up may still run, until Reset.
//   - Across atomicity domains a CAS is a READ and a WRITE.
//   - A loss of power reverts unflushed words, each by itself, at 8 bytes.
//
// # Obligations of the caller
//
// The fabric has no goroutine and no clock. The caller calls Step for connections that are
// Ready; package verify/sim does, one seeded choice at a time. Otherwise Conn.Wait steps the
// fabric by itself. One goroutine uses a fabric; a Service lets several use one, each
// stepping it while it waits, so that the provider passes the tests of all providers.
package sim
