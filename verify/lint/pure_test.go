package lint

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// Packages that are programs over rounds of verbs: the same inputs always give the
// same verbs, on real fabrics and in the simulator.
var purePackages = []string{"proto", "slab", "alloc", "raw", "btree"}

var impureImports = []string{"time", "math/rand", "math/rand/v2", "crypto/rand", "os", "net", "context", "log/slog"}

func TestProtocolPackagesAreDeterministic(t *testing.T) {
	all, err := list()
	require.NoError(t, err)
	exports := map[string]string{}
	for _, p := range all {
		exports[p.ImportPath] = p.Export
	}
	for _, p := range modulePackages(t) {
		if !slices.Contains(purePackages, p.rel) {
			continue
		}
		for _, complaint := range impurities(t, p, exports) {
			t.Error(complaint)
		}
	}
}

// The rule itself is tried on code that breaks it in every way.
func TestImpuritiesAreFound(t *testing.T) {
	dir := t.TempDir()
	src := `package p
import "time"
func f(m map[int]int, c chan int) {
	for range m {}
	go f(m, c)
	select { case <-c: default: }
	_ = time.Now
}
`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "p.go"), []byte(src), 0o600))
	all, err := list()
	require.NoError(t, err)
	exports := map[string]string{}
	for _, p := range all {
		exports[p.ImportPath] = p.Export
	}
	require.Len(t, impurities(t, goPackage{Dir: dir, ImportPath: "p", rel: "p", GoFiles: []string{"p.go"}}, exports), 4)
}

func impurities(t *testing.T, p goPackage, exports map[string]string) (complaints []string) {
	t.Helper()
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, f)
	}
	lookup := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup)}
	_, err := conf.Check(p.ImportPath, fset, files, info)
	require.NoError(t, err)
	say := func(n ast.Node, what string) {
		complaints = append(complaints, fset.Position(n.Pos()).String()+": "+what+" in a protocol package")
	}
	for _, f := range files {
		for _, imp := range f.Imports {
			if path, _ := strconv.Unquote(imp.Path.Value); slices.Contains(impureImports, path) {
				say(imp, "import of "+path)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				say(n, "goroutine")
			case *ast.SelectStmt:
				say(n, "select")
			case *ast.RangeStmt:
				if _, isMap := info.TypeOf(n.X).Underlying().(*types.Map); isMap {
					say(n, "range over a map")
				}
				if call, ok := n.X.(*ast.CallExpr); ok {
					if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
						if id, ok := sel.X.(*ast.Ident); ok && id.Name == "maps" {
							say(n, "range over a map")
						}
					}
				}
			}
			return true
		})
	}
	return complaints
}
