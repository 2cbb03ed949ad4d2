package wasmcheck

import (
	"bytes"
	"fmt"
	"unicode/utf8"
)

const (
	// Every is how many units a module uses between two calls of the host.
	Every = 4096
	// MaxTable bounds the elements of a module's tables together, of 8 bytes each. Tables do not grow beyond it.
	MaxTable = 1 << 20
	// MaxLocals bounds the variables of a function, as browsers do.
	MaxLocals = 50_000
	// MaxAllLocals bounds the variables of all functions. The runtime needs about 60 bytes for each, and keeps them.
	MaxAllLocals = 1 << 20
	// MaxBranches bounds the places of a function where its path divides or meets. The time to compile a function grows
	// with more than their square, and the runtime does not look at a context meanwhile: 10 000 take some seconds.
	MaxBranches = 10_000
	// MaxFunction bounds the bytes of a function for the same reason: each load and store has a branch too.
	MaxFunction = 512 << 10
)

// What uses units.
const (
	loopUnits = 1   // the head of a loop
	callUnits = 1   // the beginning of a function that calls others
	bulkUnits = 256 // an operation on a range: it may write all of the memory
)

// Sections of a module, by their identifiers.
const (
	customSection    = 0
	typeSection      = 1
	importSection    = 2
	funcSection      = 3
	tableSection     = 4
	memorySection    = 5
	globalSection    = 6
	exportSection    = 7
	startSection     = 8
	elementSection   = 9
	codeSection      = 10
	dataSection      = 11
	dataCountSection = 12
)

// order of the sections in a module: the position of each identifier.
var order = [...]int{0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 11}

var magic = []byte("\x00asm\x01\x00\x00\x00")

// A section is one part of a module.
type section struct {
	id      byte
	content []byte
}

// A rewriter has what is known of a module.
type rewriter struct {
	module, name string // of the imported function
	types        uint32 // number of types; the next is that of the imported function
	funcs        uint32 // number of imported functions, which is the index of the new one
	globals      uint32 // number of globals, which is the index of the new one
	locals       uint64 // number of variables in the functions so far
	sections     []section
}

// Insert returns the module with an import of a function without parameters and results, which it calls
// after at most Every units. An error says what the module has that is not WebAssembly 2.0. A module
// that is not valid for another reason is returned as one that is not valid either.
func Insert(wasm []byte, module, name string) ([]byte, error) {
	w := &rewriter{module: module, name: name}
	if err := w.split(wasm); err != nil {
		return nil, err
	}
	for _, step := range []struct {
		id    byte
		apply func(r *reader, out []byte) []byte
	}{
		{typeSection, w.addType},
		{importSection, w.addImport},
		{funcSection, w.functions},
		{tableSection, w.tables},
		{memorySection, w.memories},
		{globalSection, w.addGlobal},
		{exportSection, w.exports},
		{startSection, w.start},
		{elementSection, w.elements},
		{codeSection, w.code},
		{dataSection, w.data},
		{dataCountSection, w.dataCount},
	} {
		s := w.find(step.id)
		switch {
		case s != nil:
		case step.id == typeSection, step.id == importSection, step.id == globalSection:
			s = w.add(step.id)
		default:
			continue
		}
		r := &reader{b: s.content}
		out := step.apply(r, make([]byte, 0, len(s.content)+len(s.content)/4+64))
		if r.ends(r); r.err != nil {
			return nil, fmt.Errorf("section %d: %w", step.id, r.err)
		}
		s.content = out
	}
	out := bytes.Clone(magic)
	for _, s := range w.sections {
		if s.id == customSection {
			r := &reader{b: s.content}
			name := r.name()
			if !utf8.Valid(name) {
				r.fail("is not text")
			}
			if r.err != nil {
				return nil, fmt.Errorf("name of a section: %w", r.err)
			}
			if string(name) != "name" {
				continue
			}
			if s.content = w.names(r); s.content == nil {
				continue
			}
		}
		out = appendSized(append(out, s.id), s.content)
	}
	return out, nil
}

// split finds the sections.
func (w *rewriter) split(wasm []byte) error {
	if !bytes.HasPrefix(wasm, magic) {
		return fmt.Errorf("does not begin as a module of version 1")
	}
	r := &reader{b: wasm, at: len(magic)}
	last := 0
	for r.more() {
		id := r.byte()
		content := r.bytes(int(r.u32()))
		if r.err != nil {
			break
		}
		if int(id) >= len(order) {
			return fmt.Errorf("section %d is not one of WebAssembly 2.0", id)
		}
		if id != customSection {
			if order[id] <= last {
				return fmt.Errorf("section %d stands behind one that it should precede", id)
			}
			last = order[id]
		}
		w.sections = append(w.sections, section{id, content})
	}
	return r.err
}

func (w *rewriter) find(id byte) *section {
	for i := range w.sections {
		if w.sections[i].id == id {
			return &w.sections[i]
		}
	}
	return nil
}

// add adds an empty list where its section belongs.
func (w *rewriter) add(id byte) *section {
	at := len(w.sections)
	for i, s := range w.sections {
		if s.id != customSection && order[s.id] > order[id] {
			at = i
			break
		}
	}
	w.sections = append(w.sections, section{})
	copy(w.sections[at+1:], w.sections[at:])
	w.sections[at] = section{id, []byte{0}}
	return &w.sections[at]
}

// addType adds the type of a function without parameters and results.
func (w *rewriter) addType(r *reader, out []byte) []byte {
	w.types = r.count()
	out = appendU32(out, w.types+1)
	from := r.at
	for i := uint32(0); i < w.types && r.err == nil; i++ {
		if form := r.byte(); form != 0x60 {
			r.fail("type of form %#x", form)
		}
		for range 2 { // parameters, results
			for n := r.count(); n > 0 && r.err == nil; n-- {
				r.valueType()
			}
		}
	}
	out = append(out, r.b[from:r.at]...)
	return append(out, 0x60, 0, 0)
}

// addImport counts the imports and adds the function behind them.
func (w *rewriter) addImport(r *reader, out []byte) []byte {
	n := r.count()
	from := r.at
	for i := uint32(0); i < n && r.err == nil; i++ {
		r.name()
		r.name()
		switch kind := r.byte(); kind {
		case kindFunc:
			w.funcs++
			w.checkType(r, r.u32())
		case kindTable:
			r.referenceType()
			limits(r)
		case kindMemory:
			limits(r)
		case kindGlobal:
			w.globals++
			r.globalType()
		default:
			r.fail("import of kind %d", kind)
		}
	}
	out = append(appendU32(out, n+1), r.b[from:r.at]...)
	out = appendSized(appendSized(out, []byte(w.module)), []byte(w.name))
	return appendU32(append(out, kindFunc), w.types)
}

// Kinds of what is imported and exported.
const (
	kindFunc   = 0
	kindTable  = 1
	kindMemory = 2
	kindGlobal = 3
)

// limits are those of a memory or a table; most is 1<<32-1 if there is none.
func limits(r *reader) (least, most uint32) {
	most = 1<<32 - 1
	switch flag := r.byte(); flag {
	case 0:
		least = r.u32()
	case 1:
		least, most = r.u32(), r.u32()
	default:
		r.fail("limits with flag %d", flag)
	}
	return least, most
}

// tables gives every table a limit: the runtime allocates a table's first size, and lets it grow, outside of the memory
// that a module may have. Tables share what is left of MaxTable evenly.
func (w *rewriter) tables(r *reader, out []byte) []byte {
	type table struct {
		kind        byte
		least, most uint32
	}
	var all []table
	sum := uint64(0)
	n := r.count()
	for i := uint32(0); i < n && r.err == nil; i++ {
		t := table{kind: r.referenceType()}
		t.least, t.most = limits(r)
		sum += uint64(t.least)
		all = append(all, t)
	}
	if sum > MaxTable {
		r.fail("tables of %d elements together, at most %d", sum, MaxTable)
		return out
	}
	out = appendU32(out, n)
	for _, t := range all {
		share := (MaxTable - uint32(sum)) / n
		out = append(out, t.kind, 1)
		out = appendU32(appendU32(out, t.least), min(t.most, t.least+share))
	}
	return out
}

func (w *rewriter) memories(r *reader, out []byte) []byte {
	for n := r.count(); n > 0 && r.err == nil; n-- {
		limits(r)
	}
	return append(out, r.b...)
}

// data passes what memory begins with. Flag 1: not placed by itself; 2: with the memory's number.
func (w *rewriter) data(r *reader, out []byte) []byte {
	n := r.count()
	out = appendU32(out, n)
	for i := uint32(0); i < n && r.err == nil; i++ {
		flag := r.u32()
		out = appendU32(out, flag)
		switch flag {
		case 0:
			out = w.constant(r, out)
		case 1:
		case 2:
			out = appendU32(out, r.u32())
			out = w.constant(r, out)
		default:
			r.fail("data with flag %d", flag)
		}
		out = appendSized(out, r.name())
	}
	return out
}

func (w *rewriter) dataCount(r *reader, out []byte) []byte { return appendU32(out, r.u32()) }

// functions passes the types of the functions.
func (w *rewriter) functions(r *reader, out []byte) []byte {
	for n := r.count(); n > 0 && r.err == nil; n-- {
		w.checkType(r, r.u32())
	}
	return append(out, r.b...)
}

// addGlobal rewrites the globals' first values and adds the count behind them.
func (w *rewriter) addGlobal(r *reader, out []byte) []byte {
	n := r.count()
	w.globals += n
	out = appendU32(out, n+1)
	for i := uint32(0); i < n && r.err == nil; i++ {
		from := r.at
		r.globalType()
		if r.err == nil {
			out = append(out, r.b[from:r.at]...)
		}
		out = w.constant(r, out)
	}
	out = append(out, valueI32, 1, opI32Const)
	return append(appendSigned(out, Every), opEnd)
}

func (w *rewriter) exports(r *reader, out []byte) []byte {
	n := r.count()
	out = appendU32(out, n)
	for i := uint32(0); i < n && r.err == nil; i++ {
		out = appendSized(out, r.name())
		kind := r.byte()
		index := r.u32()
		switch kind {
		case kindFunc:
			index = w.fun(r, index)
		case kindTable, kindMemory:
		case kindGlobal:
			w.checkGlobal(r, index)
		default:
			r.fail("export of kind %d", kind)
		}
		out = appendU32(append(out, kind), index)
	}
	return out
}

func (w *rewriter) start(r *reader, out []byte) []byte { return appendU32(out, w.fun(r, r.u32())) }

// elements rewrites what tables begin with: a list of functions, or of expressions. Bits of the
// flag: 1 not placed in a table by itself, 2 with the table's number or the declarative kind, 4 expressions.
func (w *rewriter) elements(r *reader, out []byte) []byte {
	n := r.count()
	out = appendU32(out, n)
	for i := uint32(0); i < n && r.err == nil; i++ {
		flag := r.u32()
		if flag > 7 {
			r.fail("elements with flag %d", flag)
		}
		out = appendU32(out, flag)
		if flag&1 == 0 {
			if flag&2 != 0 {
				out = appendU32(out, r.u32())
			}
			out = w.constant(r, out)
		}
		switch {
		case flag&3 == 0:
		case flag&4 != 0:
			out = append(out, r.referenceType())
		default:
			kind := r.byte()
			if kind != 0 {
				r.fail("elements of kind %#x", kind)
			}
			out = append(out, kind)
		}
		m := r.count()
		out = appendU32(out, m)
		for j := uint32(0); j < m && r.err == nil; j++ {
			if flag&4 != 0 {
				out = w.constant(r, out)
			} else {
				out = appendU32(out, w.fun(r, r.u32()))
			}
		}
	}
	return out
}

// names moves the indices of functions in the section of names, which traces use; nil if it cannot be read. Names of
// locals and the like are left out.
func (w *rewriter) names(r *reader) []byte {
	out := bytes.Clone(r.b[:r.at])
	for r.more() {
		id, b := r.byte(), r.name()
		if id != 1 {
			continue
		}
		s := &reader{b: b}
		n := s.count()
		list := appendU32(nil, n)
		for i := uint32(0); i < n && s.err == nil; i++ {
			list = appendU32(list, w.fun(s, s.u32()))
			list = appendSized(list, s.name())
		}
		if r.ends(s); r.err == nil {
			return appendSized(append(out, id), list)
		}
	}
	return nil
}

// fun is the new index of a function.
func (w *rewriter) fun(r *reader, index uint32) uint32 {
	switch {
	case index < w.funcs:
	case index == 1<<32-1:
		r.fail("function %d", index) // the next number would be 0
	default:
		index++
	}
	return index
}

// checkType refuses the index of the added type, which is not the module's.
func (w *rewriter) checkType(r *reader, index uint32) {
	if index >= w.types {
		r.fail("type %d of %d", index, w.types)
	}
}

// checkGlobal refuses the index of the count, which is not the module's.
func (w *rewriter) checkGlobal(r *reader, index uint32) {
	if index >= w.globals {
		r.fail("global %d of %d", index, w.globals)
	}
}
