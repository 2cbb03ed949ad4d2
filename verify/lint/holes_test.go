package lint

import (
	"go/ast"
	"strings"
	"testing"
)

// Nothing makes a hole in a region's file, which would give its reservation up and split
// the memory of devices from that of processors. Reserve alone fills holes, so that no
// memory of a region is made or opened another way. The pager gives pages back that way: its files are no regions.
func TestHolesAreMadeInOnePlace(t *testing.T) {
	eachFile(t, func(_ *goPackage, path string, _ []byte, f *ast.File) {
		if strings.HasSuffix(path, "internal/uffd/discard.go") {
			return
		}
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			switch {
			case !ok:
			case s.Sel.Name == "MADV_REMOVE" || strings.HasPrefix(s.Sel.Name, "FALLOC_FL_"):
				t.Errorf("%s uses %s: zero region memory with host.Memory.Zero", path, s.Sel.Name)
			case s.Sel.Name == "Fallocate" && !strings.HasSuffix(path, "rdma/host/reserve.go"):
				t.Errorf("%s uses %s: reserve region memory with host.Reserve", path, s.Sel.Name)
			}
			return true
		})
	})
}
