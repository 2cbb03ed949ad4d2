package wasmcheck

import (
	"context"
	"encoding/binary"
	"errors"
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
		"a table of 1048577 elements":      join(part(tableSection, append([]byte{1, 0x70, 0}, appendU32(nil, MaxTable+1)...)...), part(codeSection, 0)),
		"with 50001 variables":             join(part(codeSection, list(appendSized(nil, append(appendU32([]byte{1}, MaxLocals+1), valueI32, opEnd)))...)),
		"type of form 0x5f":                join(part(typeSection, 1, 0x5f, 0, 0), part(codeSection, 0)),
		"data with flag 3":                 join(part(codeSection, 0), part(dataSection, 1, 3)),
		"is no number of 32 bits":          append(append(join(), typeSection), long...),
		"instruction 0x12 is not":          body(0x12, 0), // return_call, a later version's
		"instruction 0xfd 256 is not":      body(opVector, 0x80, 2),
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

// FuzzInsert: a module that the runtime compiles is rewritten, and the runtime compiles that too. No module of a few bytes
// that is rewritten makes the runtime use much memory.
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
