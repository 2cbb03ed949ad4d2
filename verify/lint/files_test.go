package lint

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const maxFileLines = 800

func generated(src []byte) bool {
	return bytes.HasPrefix(src, []byte("// Code generated")) || bytes.Contains(src[:min(len(src), 2000)], []byte("\n// Code generated"))
}

// unsafe only where the name of the file says so, cgo only in the provider for adapters and in the C library.
func TestUnsafeAndCgoHaveTheirPlaces(t *testing.T) {
	eachFile(t, func(p *goPackage, path string, src []byte, f *ast.File) {
		for _, imp := range f.Imports {
			name := filepath.Base(path)
			if imp.Path.Value == `"unsafe"` && !unsafeAllowed(name) && !generated(src) {
				t.Errorf("%s imports unsafe: put what needs it into a file named *_unsafe.go", path)
			}
			if imp.Path.Value == `"C"` && p.rel != "rdma/verbs" && p.rel != "cmd/libquarry" && p.rel != "cmd/librpmem" {
				t.Errorf("%s uses cgo: only rdma/verbs, cmd/libquarry and cmd/librpmem may", path)
			}
		}
	})
}

func unsafeAllowed(file string) bool {
	return strings.HasSuffix(file, "_unsafe.go") || strings.HasSuffix(file, "_unsafe_test.go")
}

func TestFilesAreShort(t *testing.T) {
	eachFile(t, func(_ *goPackage, path string, src []byte, _ *ast.File) {
		if n := bytes.Count(src, []byte("\n")); n > maxFileLines && !generated(src) {
			t.Errorf("%s has %d lines, more than %d: cut it by topic", path, n, maxFileLines)
		}
	})
}

const maxFunctionLines = 86

// A function that is longer does several things, unless it makes a table.
func TestFunctionsAreShort(t *testing.T) {
	fset := token.NewFileSet()
	eachFile(t, func(_ *goPackage, path string, src []byte, _ *ast.File) {
		if strings.HasSuffix(path, "_test.go") || generated(src) {
			return
		}
		f, err := parser.ParseFile(fset, path, src, 0)
		require.NoError(t, err)
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Name.Name == "commandTable" {
				continue
			}
			if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1; n > maxFunctionLines {
				t.Errorf("%s: %s has %d lines, more than %d: cut it by what it does", path, fn.Name.Name, n, maxFunctionLines)
			}
		}
	})
}

// Every package says what it is for; a package of several files does so in doc.go.
func TestPackagesHaveComments(t *testing.T) {
	type doc struct{ anywhere, inDoc bool }
	docs := map[string]*doc{}
	files := map[string]int{}
	eachFile(t, func(p *goPackage, path string, src []byte, f *ast.File) {
		name := filepath.Base(path)
		if strings.HasSuffix(name, "_test.go") && len(p.GoFiles)+len(p.CgoFiles) > 0 {
			return
		}
		if docs[p.rel] == nil {
			docs[p.rel] = &doc{}
		}
		if !generated(src) {
			files[p.rel]++
		}
		if f.Doc != nil {
			docs[p.rel].anywhere = true
			docs[p.rel].inDoc = docs[p.rel].inDoc || name == "doc.go" || name == "main.go"
		}
	})
	for pkg, d := range docs {
		switch {
		case strings.HasSuffix(pkg, "connect"):
			// generated
		case !d.anywhere:
			t.Errorf("package %s has no comment", pkg)
		case files[pkg] > 1 && !d.inDoc:
			t.Errorf("package %s has several files and no package comment in doc.go (a command: main.go)", pkg)
		}
	}
}

// Nothing in the repository depends on, or tells of, the machine it was made on.
func TestNoMachinePaths(t *testing.T) {
	root := filepath.Join("..", "..")
	out, err := exec.Command("git", "-C", root, "ls-files", "-co", "--exclude-standard").Output()
	if err != nil {
		t.Skip("not a git checkout: ", err)
	}
	// Written so that this file does not match.
	bad := regexp.MustCompile(`(^|[^\w./-])/(` + strings.Join([]string{"root", "home", "work", "farm"}, "|") + `)/\w|\.\./` + `shared/`)
	for _, name := range strings.Fields(string(out)) {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || bytes.IndexByte(b[:min(len(b), 8000)], 0) >= 0 {
			continue
		}
		for i, line := range strings.Split(string(b), "\n") {
			if m := bad.FindString(line); m != "" {
				t.Errorf("%s:%d mentions a path of one machine: %s", name, i+1, strings.TrimSpace(line))
			}
		}
	}
}

func eachFile(t *testing.T, f func(*goPackage, string, []byte, *ast.File)) {
	t.Helper()
	fset := token.NewFileSet()
	for _, p := range modulePackages(t) {
		for _, path := range p.files() {
			src, err := os.ReadFile(path)
			require.NoError(t, err)
			file, err := parser.ParseFile(fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
			require.NoError(t, err)
			f(&p, path, src, file)
		}
	}
}
