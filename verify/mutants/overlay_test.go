package mutants

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/scanner"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// root is the directory of the module.
const root = "../.."

const selectedPath = "github.com/quarrystore/quarry/verify/mutants/selected"

// span is a text of a file, from..to, that becomes another.
type span struct {
	from, to int
	text     string
}

// splice applies spans, which lie within src[from:to] and do not overlap.
func splice(src []byte, from, to int, spans []span) string {
	slices.SortStableFunc(spans, func(a, b span) int { return a.from - b.from })
	var b strings.Builder
	for _, s := range spans {
		b.Write(src[from:s.from])
		b.WriteString(s.text)
		from = s.to
	}
	b.Write(src[from:to])
	return b.String()
}

// lexeme is a token with its place. Comments and semicolons that stand for the end of a
// line are no lexemes, so that text matches however it is wrapped or explained.
type lexeme struct {
	text     string
	from, to int
}

func lexemes(src []byte) []lexeme {
	var s scanner.Scanner
	file := token.NewFileSet().AddFile("", -1, len(src))
	s.Init(file, src, func(token.Position, string) {}, 0)
	var out []lexeme
	for {
		pos, tok, lit := s.Scan()
		switch {
		case tok == token.EOF:
			return out
		case tok == token.SEMICOLON && lit == "\n":
			continue
		case lit == "":
			lit = tok.String()
		}
		at := file.Offset(pos)
		out = append(out, lexeme{lit, at, at + len(lit)})
	}
}

// occurrences are the places of old in src.
func occurrences(src []byte, old string) (found []span) {
	text, want := lexemes(src), lexemes([]byte(old))
	for i := 0; len(want) > 0 && i+len(want) <= len(text); i++ {
		if slices.EqualFunc(text[i:i+len(want)], want, func(a, b lexeme) bool { return a.text == b.text }) {
			found = append(found, span{from: text[i].from, to: text[i+len(want)-1].to})
		}
	}
	return found
}

func sameCode(a, b string) bool {
	return slices.EqualFunc(lexemes([]byte(a)), lexemes([]byte(b)), func(a, b lexeme) bool { return a.text == b.text })
}

// source is a parsed file.
type source struct {
	path string // absolute
	text []byte
	set  *token.FileSet
	file *ast.File
}

func (s *source) offset(p token.Pos) int { return s.set.Position(p).Offset }

// sources reads packages of the module, each once.
type sources map[string][]*source

func (all sources) of(dir string) ([]*source, error) {
	if files, ok := all[dir]; ok {
		return files, nil
	}
	abs, err := filepath.Abs(filepath.Join(root, dir))
	if err != nil {
		return nil, err
	}
	pkg, err := build.ImportDir(abs, 0)
	if err != nil {
		return nil, err
	}
	for _, name := range pkg.GoFiles {
		s := &source{path: filepath.Join(abs, name), set: token.NewFileSet()}
		if s.text, err = os.ReadFile(s.path); err != nil {
			return nil, err
		}
		if s.file, err = parser.ParseFile(s.set, s.path, s.text, parser.SkipObjectResolution); err != nil {
			return nil, err
		}
		all[dir] = append(all[dir], s)
	}
	return all[dir], nil
}

// function is a function of the product, as an edit names it.
type function struct {
	*source
	decl *ast.FuncDecl
}

// find finds a function by its name, as a stack trace writes it: slab.(*Lane).Read.
func (all sources) find(name string) (function, error) {
	slash := strings.LastIndexByte(name, '/') + 1
	pkg, local, ok := strings.Cut(name[slash:], ".")
	if !ok {
		return function{}, fmt.Errorf("%q is not the name of a function: want package/path.Function or package/path.(*Type).Method", name)
	}
	files, err := all.of(name[:slash] + pkg)
	if err != nil {
		return function{}, err
	}
	var found []function
	for _, s := range files {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil && localName(f) == local {
				found = append(found, function{s, f})
			}
		}
	}
	if len(found) != 1 {
		return function{}, fmt.Errorf("%d functions are named %s", len(found), name)
	}
	return found[0], nil
}

func localName(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	t, pointer := f.Recv.List[0].Type, false
	if star, ok := t.(*ast.StarExpr); ok {
		t, pointer = star.X, true
	}
	switch x := t.(type) {
	case *ast.IndexExpr:
		t = x.X
	case *ast.IndexListExpr:
		t = x.X
	}
	name := t.(*ast.Ident).Name
	if pointer {
		name = "(*" + name + ")"
	}
	return name + "." + f.Name.Name
}

// overlay is a build of the module in which every function that a mutant changes begins
// with a question: is this mutant selected? If so a changed copy of it is called.
type overlay struct {
	sources sources
	spans   map[*source][]span
	copies  map[*source][]string
	named   map[*ast.FuncDecl]bool
}

func newOverlay() *overlay {
	return &overlay{sources{}, map[*source][]span{}, map[*source][]string{}, map[*ast.FuncDecl]bool{}}
}

// add adds a mutant. An error says that it does not apply.
func (o *overlay) add(number int, m *mutant) error {
	changed := map[*ast.FuncDecl][]span{}
	var order []function
	for _, e := range m.edits {
		f, err := o.sources.find(e.in)
		if err != nil {
			return err
		}
		if sameCode(e.old, e.new) {
			return fmt.Errorf("the new text in %s is the same code as the old", e.in)
		}
		from, to := f.offset(f.decl.Body.Lbrace)+1, f.offset(f.decl.Body.Rbrace)
		found := occurrences(f.text[from:to], e.old)
		if len(found) != 1 {
			return fmt.Errorf("%s has its old text %d times, which has to be there once:\n%s", e.in, len(found), e.old)
		}
		s := span{from + found[0].from, from + found[0].to, e.new}
		for _, other := range changed[f.decl] {
			if s.from < other.to && other.from < s.to {
				return fmt.Errorf("two edits of %s overlap", e.in)
			}
		}
		if changed[f.decl] == nil {
			order = append(order, f)
		}
		changed[f.decl] = append(changed[f.decl], s)
	}
	for _, f := range order {
		o.copyOf(f, number, m.name, changed[f.decl])
	}
	return nil
}

// copyOf adds a changed copy of a function, and the call of it to the original.
func (o *overlay) copyOf(f function, number int, title string, changed []span) {
	names, call := f.signature()
	if !o.named[f.decl] {
		o.named[f.decl] = true
		o.spans[f.source] = append(o.spans[f.source], names...)
	}
	name := fmt.Sprintf("%s__mutant%d", f.decl.Name.Name, number)
	target := name
	if f.decl.Recv != nil {
		target = "recv__." + name
		if n := f.decl.Recv.List[0].Names; len(n) == 1 && n[0].Name != "_" {
			target = n[0].Name + "." + name
		}
	}
	jump := target + call
	if f.decl.Type.Results != nil {
		jump = "return " + jump
	} else {
		jump += "; return"
	}
	begin := f.offset(f.decl.Body.Lbrace) + 1
	o.spans[f.source] = append(o.spans[f.source], span{begin, begin, fmt.Sprintf(" if mutant__.Is(%d) { %s };", number, jump)})
	at, end := f.offset(f.decl.Name.Pos()), f.offset(f.decl.Name.End())
	text := splice(f.text, f.offset(f.decl.Pos()), f.offset(f.decl.End()), slices.Concat(names, changed, []span{{at, end, name}}))
	o.copies[f.source] = append(o.copies[f.source], fmt.Sprintf("//line mutant %q in %s:1\n%s\n", title, localName(f.decl), text))
}

// signature gives the spans that name the receiver and parameters without a name, and the
// arguments that pass all of them on.
func (f function) signature() (names []span, call string) {
	name := func(field *ast.Field, prefix string) (all []string) {
		if len(field.Names) == 0 {
			at := f.offset(field.Type.Pos())
			names = append(names, span{at, at, prefix + " "})
			return []string{prefix}
		}
		for i, n := range field.Names {
			if n.Name != "_" {
				all = append(all, n.Name)
				continue
			}
			given := fmt.Sprint(prefix, "_", i)
			if f.decl.Recv != nil && field == f.decl.Recv.List[0] {
				given = prefix
			}
			names = append(names, span{f.offset(n.Pos()), f.offset(n.End()), given})
			all = append(all, given)
		}
		return all
	}
	if f.decl.Recv != nil {
		name(f.decl.Recv.List[0], "recv__")
	}
	var args []string
	for i, field := range f.decl.Type.Params.List {
		args = append(args, name(field, fmt.Sprint("arg__", i))...)
		if _, ok := field.Type.(*ast.Ellipsis); ok {
			args[len(args)-1] += "..."
		}
	}
	var types []string
	if f.decl.Type.TypeParams != nil {
		for _, field := range f.decl.Type.TypeParams.List {
			for _, n := range field.Names {
				types = append(types, n.Name)
			}
		}
		call = "[" + strings.Join(types, ", ") + "]"
	}
	return names, call + "(" + strings.Join(args, ", ") + ")"
}

// write writes the changed files into a directory, and what go build -overlay reads.
func (o *overlay) write(dir string) (config string, err error) {
	replace := map[string]string{}
	for i, s := range slices.SortedFunc(maps.Keys(o.spans), func(a, b *source) int { return strings.Compare(a.path, b.path) }) {
		at := s.offset(s.file.Name.End())
		spans := append(slices.Clone(o.spans[s]), span{at, at, fmt.Sprintf("; import mutant__ %q", selectedPath)})
		text := splice(s.text, 0, len(s.text), spans) + "\n" + strings.Join(o.copies[s], "\n")
		path := filepath.Join(dir, fmt.Sprintf("%d_%s", i, filepath.Base(s.path)))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return "", err
		}
		replace[s.path] = path
	}
	config = filepath.Join(dir, "overlay.json")
	b, err := json.MarshalIndent(map[string]any{"Replace": replace}, "", "  ")
	if err != nil {
		return "", err
	}
	return config, os.WriteFile(config, b, 0o600)
}
