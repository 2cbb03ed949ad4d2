package lint

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/testbinary"
)

const module = "github.com/quarrystore/quarry"

// goPackage is what go list says of a package.
type goPackage struct {
	Dir, ImportPath string
	Export          string
	GoFiles         []string
	CgoFiles        []string
	IgnoredGoFiles  []string
	TestGoFiles     []string
	XTestGoFiles    []string
	Imports, Deps   []string

	rel string // import path within the module
}

var list = sync.OnceValues(func() ([]goPackage, error) {
	cmd := exec.Command("go", "list", "-e", "-export", "-deps",
		"-json=Dir,ImportPath,Export,GoFiles,CgoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles,Imports,Deps", "./...")
	cmd.Dir, cmd.Env = filepath.Join("..", ".."), testbinary.ToolEnv()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var pkgs []goPackage
	for d := json.NewDecoder(out); ; {
		var p goPackage
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		p.rel = strings.TrimPrefix(p.ImportPath, module+"/")
		pkgs = append(pkgs, p)
	}
	return pkgs, cmd.Wait()
})

// modulePackages lists the packages of this module.
func modulePackages(t *testing.T) []goPackage {
	t.Helper()
	all, err := list()
	require.NoError(t, err)
	var mine []goPackage
	for _, p := range all {
		if strings.HasPrefix(p.ImportPath, module+"/") {
			mine = append(mine, p)
		}
	}
	require.NotEmpty(t, mine)
	return mine
}

// files are the paths of all Go files of a package, also those that the build
// at hand leaves out.
func (p *goPackage) files() []string {
	var out []string
	for _, set := range [][]string{p.GoFiles, p.CgoFiles, p.IgnoredGoFiles, p.TestGoFiles, p.XTestGoFiles} {
		for _, f := range set {
			out = append(out, filepath.Join(p.Dir, f))
		}
	}
	return out
}
