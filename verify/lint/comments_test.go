package lint

import (
	"go/ast"
	"strings"
	"testing"
)

// TestCommentsNameTheirFunction: the comment of a function begins with the function's name,
// or with a capital letter. A comment that begins with another name describes a function
// that has been renamed.
func TestCommentsNameTheirFunction(t *testing.T) {
	eachFile(t, func(_ *goPackage, path string, _ []byte, file *ast.File) {
		for _, d := range file.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Doc == nil || strings.HasSuffix(path, "_test.go") {
				continue
			}
			first, _, _ := strings.Cut(fn.Doc.Text(), " ")
			first = strings.TrimRight(first, ":,.\n")
			if first != "" && first != fn.Name.Name && first[0] >= 'a' && first[0] <= 'z' {
				t.Errorf("%s: the comment of %s begins with %q", path, fn.Name.Name, first)
			}
		}
	})
}
