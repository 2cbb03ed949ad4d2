package wasmcheck

import (
	"context"
	"encoding/binary"
	"errors"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// part is a section of a module.
func part(id byte, content ...byte) []byte { return appendSized([]byte{id}, content) }

// list is a list of entries.
func list(entries ...[]byte) []byte {
	b := []byte{byte(len(entries))}
	for _, e := range entries {
		b = append(b, e...)
	}
	return b
}

// function is the body of a function without locals.
func function(code ...byte) []byte {
	return appendSized(nil, append(append([]byte{0}, code...), opEnd))
}

func join(parts ...[]byte) []byte {
	b := append([]byte(nil), magic...)
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// program is a module of functions without parameters and results, of which the first is exported as run.
func program(functions ...[]byte) []byte {
	types := make([][]byte, len(functions))
	for i := range types {
		types[i] = []byte{0}
	}
	return join(
		part(typeSection, 1, 0x60, 0, 0),
		part(funcSection, list(types...)...),
		part(5, 1, 0, 16), // memory of 1 MiB
		part(exportSection, append([]byte{1, 3}, "run\x00\x00"...)...),
		part(codeSection, list(functions...)...),
	)
}

var errEnough = errors.New("enough")

// run runs a rewritten module, and ends it when it has called the host so often. It returns how often it has.
func run(t *testing.T, wasm []byte, most int) (calls int, err error) {
	ctx := t.Context()
	wasm, err = Insert(wasm, "host", "check")
	require.NoError(t, err)
	r := wazero.NewRuntime(ctx)
	defer r.Close(ctx)
	_, err = r.NewHostModuleBuilder("host").NewFunctionBuilder().WithGoFunction(api.GoFunc(func(context.Context, []uint64) {
		if calls++; calls == most {
			panic(errEnough)
		}
	}), nil, nil).Export("check").Instantiate(ctx)
	require.NoError(t, err)
	m, err := r.Instantiate(ctx, wasm)
	require.NoError(t, err)
	_, err = m.ExportedFunction("run").Call(ctx)
	return calls, err
}

var (
	forever = []byte{opLoop, noResult, 0x0c, 0, opEnd}
	fill    = []byte{opI32Const, 0, opI32Const, 0, opI32Const, 0x80, 0x80, 0x3f, opMisc, 11, 0} // about 1 MiB
)

// TestEndlessModulesCallTheHost: each way of a module to run for ever or for ages calls the host.
func TestEndlessModulesCallTheHost(t *testing.T) {
	for name, functions := range map[string][][]byte{
		"loop":           {function(forever...)},
		"loop in a loop": {function(append(append([]byte{opLoop, noResult}, forever...), opEnd)...)},
		// Each function calls the next one twice: 2^64 calls, no loop, 65 frames.
		"calls without a loop": func() (all [][]byte) {
			for i := range 64 {
				all = append(all, function(opCall, byte(i+1), opCall, byte(i+1)))
			}
			return append(all, function())
		}(),
		"ranges of memory": func() [][]byte {
			var code []byte
			for range 100 * Every / bulkUnits {
				code = append(code, fill...)
			}
			return [][]byte{function(code...)}
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			calls, err := run(t, program(functions...), 100)
			require.ErrorIs(t, err, errEnough)
			require.Equal(t, 100, calls)
		})
	}
}

// TestUnits: the host is called once for each Every units, and a module that ends earlier does not call it.
func TestUnits(t *testing.T) {
	// for i = n; i != 0; i-- {}
	count := func(n int) []byte {
		code := append(appendSigned([]byte{opI32Const}, n), 0x21, 0, opLoop, noResult, 0x20, 0, opI32Const, 1, opI32Sub, 0x22, 0, 0x0d, 0, opEnd, opEnd)
		return appendSized(nil, append([]byte{1, 1, valueI32}, code...))
	}
	for n, want := range map[int]int{1: 0, Every - 1: 0, Every: 1, 3*Every - 1: 2, 3 * Every: 3} {
		calls, err := run(t, program(count(n)), 1<<30)
		require.NoError(t, err)
		require.Equal(t, want, calls, n)
	}
	calls, err := run(t, program(function(bytesOf(fill, Every/bulkUnits)...)), 1<<30)
	require.NoError(t, err)
	require.Equal(t, 1, calls)
}

func bytesOf(code []byte, times int) (b []byte) {
	for range times {
		b = append(b, code...)
	}
	return b
}

// TestTheCountIsOutOfReach: a module cannot name the global that counts, wherever globals are named.
func TestTheCountIsOutOfReach(t *testing.T) {
	own := part(globalSection, 1, valueI32, 1, opI32Const, 0, opEnd)
	with := func(code ...byte) []byte {
		return join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0), own, part(codeSection, list(function(code...))...))
	}
	_, err := Insert(with(opGlobalGet, 0, opGlobalSet, 0), "host", "check")
	require.NoError(t, err)
	for name, wasm := range map[string][]byte{
		"read":    with(opGlobalGet, 1, 0x1a),
		"written": with(opI32Const, 0, opGlobalSet, 1),
		"exported": join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0), own,
			part(exportSection, 1, 1, 'g', kindGlobal, 1), part(codeSection, list(function())...)),
		"first value": join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0),
			part(globalSection, 1, valueI32, 1, opGlobalGet, 1, opEnd), part(codeSection, list(function())...)),
	} {
		_, err := Insert(wasm, "host", "check")
		require.ErrorContains(t, err, "global 1 of 1", name)
	}
}

// TestFilesThatAreRefused: an error says what is wrong, and where.
func TestFilesThatAreRefused(t *testing.T) {
	body := func(code ...byte) []byte {
		return join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0), part(codeSection, list(function(code...))...))
	}
	long := binary.AppendUvarint(nil, 1<<40)
	for want, wasm := range map[string][]byte{
		"does not begin as a module":       []byte("#!/bin/sh"),
		"section 14 is not":                join(part(14)),
		"stands behind one":                join(part(funcSection, 0), part(typeSection, 0)),
		"ends too early":                   append(join(), typeSection, 9),
		"a list of 100 entries":            join(part(typeSection, 100), part(codeSection, 0)),
		"tables of 1048577 elements":       join(part(tableSection, append([]byte{1, 0x70, 0}, appendU32(nil, MaxTable+1)...)...), part(codeSection, 0)),
		"with 50001 variables":             join(part(codeSection, list(appendSized(nil, append(appendU32([]byte{1}, MaxLocals+1), valueI32, opEnd)))...)),
		"type of form 0x5f":                join(part(typeSection, 1, 0x5f, 0, 0), part(codeSection, 0)),
		"data with flag 3":                 join(part(codeSection, 0), part(dataSection, 1, 3)),
		"is no number of 32 bits":          append(append(join(), typeSection), long...),
		"instruction 0x12 is not":          body(0x12, 0), // return_call, a later version's
		"instruction 0xfd 0x80 0x2 is not": body(opVector, 0x80, 2),
		"instruction 0xfc 18 is not":       body(opMisc, 18),
		"alignment of 2^64":                body(opI32Const, 0, 0x28, 64, 0),
		"import of kind 4":                 join(part(importSection, 1, 1, 'm', 1, 'n', 4, 0, 0), part(codeSection, 0)),
		"a function does not end with end": join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0), part(codeSection, 1, 2, 0, 1)),
		"is behind the end":                join(part(typeSection, 0), part(exportSection, 0, 7), part(codeSection, 0)),
		"in a constant": join(part(typeSection, 1, 0x60, 0, 0), part(funcSection, 1, 0),
			part(globalSection, 1, valueI32, 1, opLoop, noResult, opEnd), part(codeSection, list(function())...)),
	} {
		_, err := Insert(wasm, "host", "check")
		require.ErrorContains(t, err, want)
	}
}

// TestHiddenLoops: the runtime reads types and encodings of later versions, without a switch. Where the rewriter reads other
// borders between instructions than the runtime, a loop may stand in what it takes for an operand. Such modules are refused.
func TestHiddenLoops(t *testing.T) {
	// A loop that ends when the local variable is 0.
	loop := []byte{opLoop, noResult, 1, 0x20, 0, opI32Const, 1, opI32Sub, 0x22, 0, 0x0d, 0, opEnd}
	begin := append(appendSigned([]byte{1, 1, valueI32, opI32Const}, 100*Every), 0x21, 0)
	types := make([][]byte, 33)
	for i := range types {
		types[i] = []byte{0x60, 0, 0}
	}
	for want, code := range map[string][]byte{
		// The type of the block has two bytes, of which the second is local.get, and loop its operand.
		"type of a block is -29": append(append([]byte{opBlock, 0x63, 0x20}, loop...), 0x0f, opEnd, 0x1a, opEnd),
		// A load with alignment 11 and offset 3; or instruction 0x83, nothing, end, loop.
		"instruction 0xfd 0x83 0x0 is not": append(append([]byte{opBlock, noResult, opI32Const, 1, 0x0d, 0, 0, opVector, 0x83, 0, opEnd}, loop...), opEnd),
	} {
		_, err := Insert(join(part(typeSection, list(types...)...), part(funcSection, 1, 0), part(memorySection, 1, 0, 16),
			part(codeSection, list(appendSized(nil, append(append([]byte(nil), begin...), code...)))...)), "host", "check")
		require.ErrorContains(t, err, want)
	}
}

// TestTypesOfLaterVersionsAreRefused: wherever a type stands. The runtime reads more bytes for each of them.
func TestTypesOfLaterVersionsAreRefused(t *testing.T) {
	one := []byte{0x60, 0, 0}
	for place, with := range map[string]func(byte) []byte{
		"parameter": func(b byte) []byte { return join(part(typeSection, 1, 0x60, 1, b, 0)) },
		"result":    func(b byte) []byte { return join(part(typeSection, 1, 0x60, 0, 1, b)) },
		"imported table": func(b byte) []byte {
			return join(part(importSection, 1, 1, 'm', 1, 'n', kindTable, b, 0, 1))
		},
		"imported global": func(b byte) []byte {
			return join(part(importSection, 1, 1, 'm', 1, 'n', kindGlobal, b, 0))
		},
		"table":    func(b byte) []byte { return join(part(tableSection, 1, b, 0, 1)) },
		"global":   func(b byte) []byte { return join(part(globalSection, 1, b, 0, opRefNull, funcref, opEnd)) },
		"elements": func(b byte) []byte { return join(part(elementSection, 1, 5, b, 0)) },
		"null":     func(b byte) []byte { return join(part(globalSection, 1, funcref, 0, opRefNull, b, opEnd)) },
		"local": func(b byte) []byte {
			return join(part(typeSection, list(one)...), part(codeSection, list(appendSized(nil, []byte{1, 1, b, opEnd}))...))
		},
		"select": func(b byte) []byte {
			return join(part(typeSection, list(one)...), part(codeSection, list(function(opSelect, 1, b))...))
		},
		"block": func(b byte) []byte {
			return join(part(typeSection, list(one)...), part(codeSection, list(function(opBlock, b, opEnd))...))
		},
		"null in code": func(b byte) []byte {
			return join(part(typeSection, list(one)...), part(codeSection, list(function(opRefNull, b))...))
		},
	} {
		_, err := Insert(with(funcref), "host", "check")
		require.NoError(t, err, place)
		for _, b := range []byte{0x63, 0x64, 0x69, 0x40, 0x71, 0x7a, 0x00, 0x80} {
			if place == "block" && (b == 0x40 || b == 0x00 || b == 0x80) { // none, and an index
				continue
			}
			_, err := Insert(with(b), "host", "check")
			require.ErrorContains(t, err, "type", "%s: %#x", place, b)
		}
	}
}

// TestLimitsOfTheWholeModule: what a short file may make the runtime allocate is bounded by the module, not by each entry.
func TestLimitsOfTheWholeModule(t *testing.T) {
	locals := appendSized(nil, append(appendU32([]byte{1}, MaxLocals), valueI32, opEnd))
	code := func(n int) []byte { return join(part(codeSection, list(slices.Repeat([][]byte{locals}, n)...)...)) }
	_, err := Insert(code(MaxAllLocals/MaxLocals), "host", "check")
	require.NoError(t, err)
	_, err = Insert(code(MaxAllLocals/MaxLocals+1), "host", "check")
	require.ErrorContains(t, err, "functions with 1050000 variables together, at most 1048576")

	table := append([]byte{funcref, 0}, appendU32(nil, MaxTable/2)...)
	_, err = Insert(join(part(tableSection, list(table, table)...)), "host", "check")
	require.NoError(t, err)
	_, err = Insert(join(part(tableSection, list(table, table, []byte{funcref, 0, 1})...)), "host", "check")
	require.ErrorContains(t, err, "tables of 1048577 elements together, at most 1048576")
}

// TestTablesShareTheirLimit: together they do not grow beyond it, and each keeps its own limit.
func TestTablesShareTheirLimit(t *testing.T) {
	r := &reader{b: list([]byte{funcref, 0, 0}, []byte{external, 0, 100}, []byte{funcref, 1, 1, 5}, []byte{funcref, 0, 0})}
	out := new(rewriter).tables(r, nil)
	require.NoError(t, r.err)
	r = &reader{b: out}
	sum := uint32(0)
	for n := r.count(); n > 0; n-- {
		r.referenceType()
		least, most := limits(r)
		require.LessOrEqual(t, least, most)
		sum += most
	}
	require.NoError(t, r.err)
	require.LessOrEqual(t, sum, uint32(MaxTable))
	require.Greater(t, sum, uint32(MaxTable/2))
}

// TestFunctionsThatCompileForTooLong are refused: the runtime compiles one function to its end, whatever the limit.
func TestFunctionsThatCompileForTooLong(t *testing.T) {
	for name, code := range map[string][]byte{
		"loops":  {opLoop, noResult, opEnd, opLoop, noResult, opEnd, opLoop, noResult, opEnd, opLoop, noResult, opEnd, opLoop, noResult, opEnd},
		"blocks": bytesOf([]byte{opBlock, noResult, opEnd}, 5*countBranches),
		"ifs":    bytesOf([]byte{opI32Const, 0, opIf, noResult, opEnd}, 5*countBranches),
		"leaves": bytesOf([]byte{opI32Const, 0, opBrIf, 0}, 5*countBranches),
		"ranges": bytesOf(fill, 5),
	} {
		most := MaxBranches / (5 * countBranches)
		_, err := Insert(program(function(bytesOf(code, most)...)), "host", "check")
		require.NoError(t, err, name)
		_, err = Insert(program(function(bytesOf(code, most+1)...)), "host", "check")
		require.ErrorContains(t, err, "a function with more than 10000 branches", name)
	}
	_, err := Insert(program(function(make([]byte, MaxFunction-2)...)), "host", "check")
	require.NoError(t, err)
	_, err = Insert(program(function(bytesOf([]byte{1}, MaxFunction)...)), "host", "check")
	require.ErrorContains(t, err, "a function of 524290 bytes, at most 524288")
}

// TestTheLastFunctionNumber: the number behind it would be 0, which is another function.
func TestTheLastFunctionNumber(t *testing.T) {
	last := appendU32(nil, 1<<32-1)
	_, err := Insert(program(function(append([]byte{opCall}, last...)...)), "host", "check")
	require.ErrorContains(t, err, "function 4294967295")
	_, err = Insert(join(part(startSection, last...)), "host", "check")
	require.ErrorContains(t, err, "function 4294967295")
}

// TestVersionOfTheRuntime: the rewriter was compared with the decoder, the validator and the compilers of this version.
// Before the version is changed here, compare where they find the borders between instructions, types and limits.
func TestVersionOfTheRuntime(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "github.com/tetratelabs/wazero").Output()
	require.NoError(t, err)
	require.Equal(t, "v1.12.0\n", string(out))
}

// FuzzInsert: what is rewritten from a module that the runtime compiles, the runtime compiles too.
func FuzzInsert(f *testing.F) {
	f.Add(program(function(forever...)))
	f.Add(program(function(fill...), function(opCall, 0)))
	f.Add(join())
	r := wazero.NewRuntimeWithConfig(f.Context(), wazero.NewRuntimeConfigInterpreter().WithMemoryLimitPages(16))
	f.Fuzz(func(t *testing.T, wasm []byte) {
		out, err := Insert(wasm, "host", "check")
		if err != nil {
			return // not compiled by the test either: that may need any amount of memory
		}
		m, err := r.CompileModule(t.Context(), out)
		if err == nil {
			err = m.Close(t.Context())
		}
		if w := new(rewriter); err == nil || w.split(wasm) != nil || w.find(customSection) != nil {
			return // a section that Insert leaves out need not be valid
		}
		_, invalid := r.CompileModule(t.Context(), wasm)
		require.Error(t, invalid, "rewritten: %v", err)
	})
}
