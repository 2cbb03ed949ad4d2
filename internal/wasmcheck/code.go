package wasmcheck

// Instructions with a meaning for the rewriter, and those that it inserts.
const (
	opBlock        = 0x02
	opLoop         = 0x03
	opIf           = 0x04
	opElse         = 0x05
	opEnd          = 0x0b
	opBrIf         = 0x0d
	opBrTable      = 0x0e
	opCall         = 0x10
	opCallIndirect = 0x11
	opSelect       = 0x1c
	opGlobalGet    = 0x23
	opGlobalSet    = 0x24
	opI32Const     = 0x41
	opI32LtS       = 0x48
	opI32Sub       = 0x6b
	opRefNull      = 0xd0
	opRefFunc      = 0xd2
	opMisc         = 0xfc
	opVector       = 0xfd

	noResult = 0x40
	valueI32 = 0x7f
	funcref  = 0x70
	external = 0x6f
)

// immediates says what stands behind each instruction of one byte.
var immediates = func() (t [256]byte) {
	for op := range t {
		t[op] = unknown
	}
	set := func(kind byte, from, to int) {
		for op := from; op <= to; op++ {
			t[op] = kind
		}
	}
	set(none, 0x00, 0x01)
	set(block, opBlock, opIf)
	set(none, opElse, opElse)
	set(none, opEnd, opEnd)
	set(index, 0x0c, 0x0d)
	set(none, 0x0f, 0x0f)
	set(none, 0x1a, 0x1b)
	set(index, 0x20, 0x22) // of locals
	set(index, 0x25, 0x26) // of tables
	set(memory, 0x28, 0x3e)
	set(index, 0x3f, 0x40)
	set(signed32, opI32Const, opI32Const)
	set(signed64, 0x42, 0x42)
	set(four, 0x43, 0x43)
	set(eight, 0x44, 0x44)
	set(none, 0x45, 0xc4)
	set(reference, opRefNull, opRefNull)
	set(none, 0xd1, 0xd1)
	for _, op := range []int{opBrTable, opCall, opCallIndirect, opSelect, opGlobalGet, opGlobalSet, opRefFunc, opMisc, opVector} {
		t[op] = special
	}
	return t
}()

const (
	unknown byte = iota
	none
	index // a number of 32 bits
	signed32
	block // type of a block
	signed64
	memory    // alignment and offset
	reference // type of a reference
	four      // bytes
	eight
	special
)

// code rewrites the functions.
func (w *rewriter) code(r *reader, out []byte) []byte {
	n := r.count()
	out = appendU32(out, n)
	var body []byte
	for i := uint32(0); i < n && r.err == nil; i++ {
		f := r.part(r.u32())
		body = w.function(f, body[:0])
		r.ends(f)
		out = appendSized(out, body)
	}
	return out
}

// function rewrites one function.
func (w *rewriter) function(r *reader, out []byte) []byte {
	from, all := r.at, uint64(0)
	if n := len(r.b) - from; n > MaxFunction {
		r.fail("a function of %d bytes, at most %d: divide it", n, MaxFunction)
	}
	for n := r.count(); n > 0 && r.err == nil; n-- {
		all += uint64(r.u32())
		r.valueType()
	}
	if all > MaxLocals {
		r.fail("a function with %d variables, at most %d", all, MaxLocals)
	}
	if w.locals += all; w.locals > MaxAllLocals {
		r.fail("functions with %d variables together, at most %d", w.locals, MaxAllLocals)
	}
	out = append(out, r.b[from:r.at]...)
	locals := len(out)
	calls := false
	last := byte(0)
	branches := 0
	for r.more() {
		from := r.at
		last = r.byte()
		switch last {
		case opCall, opCallIndirect:
			calls = true
		case opBlock, opIf, opBrIf:
			branches++
		case opLoop:
			branches += countBranches
		case opMisc:
			at := r.at
			if isBulk(r.u32()) {
				out = w.count(out, bulkUnits)
				branches += countBranches
			}
			r.at = at
		}
		if branches > MaxBranches {
			r.fail("a function with more than %d branches: a loop and an operation on a range are %d each, divide the function", MaxBranches, countBranches)
		}
		out = w.instruction(r, from, last, out)
		if last == opLoop {
			out = w.count(out, loopUnits)
		}
	}
	if last != opEnd {
		r.fail("a function does not end with end")
	}
	if !calls {
		return out
	}
	begin := w.count(nil, callUnits)
	out = append(out, begin...)
	copy(out[locals+len(begin):], out[locals:])
	copy(out[locals:], begin)
	return out
}

// countBranches is how many branches of a function the code of count is compared with, by the time that it takes to compile.
const countBranches = 5

// count appends code that takes units off the count, and calls the host when it is used up.
func (w *rewriter) count(out []byte, units int) []byte {
	get := appendU32([]byte{opGlobalGet}, w.globals)
	set := appendU32([]byte{opGlobalSet}, w.globals)
	out = append(out, get...)
	out = append(appendSigned(append(out, opI32Const), units), opI32Sub)
	out = append(out, set...)
	out = append(out, get...)
	out = append(out, opI32Const, 1, opI32LtS, opIf, noResult)
	out = appendSigned(append(out, opI32Const), Every)
	out = append(out, set...)
	out = appendU32(append(out, opCall), w.funcs)
	return append(out, opEnd)
}

// isBulk says whether an instruction with the prefix opMisc works on a range: those that initialise, copy,
// fill or enlarge.
func isBulk(op uint32) bool {
	switch op {
	case 8, 10, 11, 12, 14, 15, 17:
		return true
	}
	return false
}

// constant rewrites an expression that has a constant value: of one type's constants, a global, or a reference.
func (w *rewriter) constant(r *reader, out []byte) []byte {
	for r.err == nil {
		from := r.at
		op := r.byte()
		switch op {
		case opEnd, opI32Const, 0x42, 0x43, 0x44, opGlobalGet, opRefNull, opRefFunc, opVector:
		default:
			r.fail("instruction %#x in a constant", op)
		}
		if out = w.instruction(r, from, op, out); op == opEnd {
			break
		}
	}
	return out
}

// instruction rewrites one instruction, whose first byte has been read.
func (w *rewriter) instruction(r *reader, from int, op byte, out []byte) []byte {
	switch immediates[op] {
	case unknown:
		r.fail("instruction %#x is not one of WebAssembly 2.0", op)
	case index:
		r.u32()
	case signed32:
		r.signed(5)
	case block:
		w.blockType(r)
	case signed64:
		r.signed(10)
	case memory:
		memarg(r)
	case reference:
		r.referenceType()
	case four:
		r.bytes(4)
	case eight:
		r.bytes(8)
	case special:
		switch op {
		case opCall, opRefFunc:
			return appendU32(append(out, op), w.fun(r, r.u32()))
		case opCallIndirect:
			w.checkType(r, r.u32())
			r.u32()
		case opGlobalGet, opGlobalSet:
			w.checkGlobal(r, r.u32())
		case opBrTable:
			for n := r.count(); n > 0 && r.err == nil; n-- {
				r.u32()
			}
			r.u32()
		case opSelect:
			if n := r.byte(); n != 1 {
				r.fail("select with %#x types", n)
			}
			r.valueType()
		case opMisc:
			misc(r)
		case opVector:
			vector(r)
		}
	}
	if r.err != nil {
		return out
	}
	return append(out, r.b[from:r.at]...)
}

// blockType passes the type of a block: none or that of a value, each of one byte, or the index of a type.
func (w *rewriter) blockType(r *reader) {
	if r.more() {
		if b := r.b[r.at]; b == noResult || isValueType(b) {
			r.at++
			return
		}
	}
	index := r.signed(5)
	if index < 0 {
		r.fail("type of a block is %d, which is not one of WebAssembly 2.0", index)
	}
	w.checkType(r, uint32(min(index, 1<<32-1)))
}

// memarg passes where in memory an instruction reads or writes. Bits above the sixth of the alignment have a
// meaning in later versions.
func memarg(r *reader) {
	if align := r.u32(); align > 31 {
		r.fail("alignment of 2^%d", align)
	}
	r.u32()
}

// misc passes what stands behind opMisc.
func misc(r *reader) {
	switch op := r.u32(); op {
	case 0, 1, 2, 3, 4, 5, 6, 7: // numbers that saturate
	case 9, 11, 13, 15, 16, 17: // one index
		r.u32()
	case 8, 10, 12, 14: // two
		r.u32()
		r.u32()
	default:
		r.fail("instruction 0xfc %d is not one of WebAssembly 2.0", op)
	}
}

// vector passes what stands behind opVector. The runtime reads one byte as the instruction's number, and the second byte
// of a number above 127 as an instruction that does nothing, which has the code 1. Other encodings are refused.
func vector(r *reader) {
	op := r.byte()
	if op >= 0x80 {
		if second := r.byte(); second != 1 {
			r.fail("instruction 0xfd %#x %#x is not one of WebAssembly 2.0 in its shortest encoding", op, second)
		}
		return // without an immediate, each of them
	}
	switch {
	case op <= 11 || op == 92 || op == 93:
		memarg(r)
	case op == 12 || op == 13: // a constant, a shuffle
		r.bytes(16)
	case op >= 21 && op <= 34: // a lane
		r.byte()
	case op >= 84 && op <= 91: // memory and lane
		memarg(r)
		r.byte()
	}
}

// appendSigned appends a small number that is not negative, in signed LEB128.
func appendSigned(b []byte, v int) []byte {
	for v >= 0x40 {
		b = append(b, byte(v&0x7f)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}
