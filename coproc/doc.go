// Package coproc is the interface of programs that run inside the cluster, beside the memory
// (US 2017/0149890 [0035]-[0037], [0053], [0105]-[0107]: co-processors beside the storage
// controller).
//
// A plugin maps records to records and optionally reduces those that share a
// key. An Env gives it objects, trees, names, its part, a log and a deadline, the same wherever the
// memory is:
//
//	type words struct{}
//
//	func (words) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
//		for w := range bytes.FieldsSeq(value) {
//			if err := emit(w, []byte("1")); err != nil {
//				return err
//			}
//		}
//		return nil
//	}
//
//	func init() { coproc.Register("words", "counts words", func() coproc.Plugin { return words{} }) }
//
// The same source is compiled into a worker (worker.Main), or into a WASM module
// (guest.Main, GOOS=wasip1) that `quarry job put` uploads. A job runs at least
// once: a part that was cut short runs again, elsewhere if need be, and what it
// emits must not depend on when and where it runs.
//
// Open is the other half of the patent's co-processor: memory for a program, without jobs, over the
// best transport of the host.
package coproc
