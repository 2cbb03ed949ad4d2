// Package wasmcheck rewrites WASM modules so that they call the host now and then. The host ends a
// module that runs for too long: compiled code cannot be interrupted, and Go's garbage collector
// waits for it as well.
//
// The runtime's own check calls the host at the head of each loop, which makes programs several times
// slower, and a module whose functions call each other without a loop is never checked. Here a module
// counts down a global at the head of each loop, at the beginning of each function that calls others,
// and before each operation on a range of memory or of a table. It calls the host when the count is
// used up.
//
// Invariant: between two calls of the host a rewritten module passes at most Every loop heads and
// beginnings of functions. Between two of them run at most as many instructions as the module has; calls of the host take as
// long as the host lets them.
//
// The module cannot avoid it. The global has the index behind those of the module, and a module that
// names this index is refused. The imported function stands behind the module's other imports; the
// indices of the module's own functions move up by one.
//
// Modules are those of WebAssembly 2.0 (sections and instructions: WebAssembly Core Specification 2.0,
// chapter 5). Others are refused, also those that the runtime would compile: it reads types and encodings of later versions
// without a switch, and where two readers see different borders between instructions, a loop can hide. Functions with very
// many branches are refused as well: the runtime compiles each to its end, whatever the time.
package wasmcheck
