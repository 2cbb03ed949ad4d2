package lint

import (
	"slices"
	"strings"
	"testing"
)

// layers lists the top-level folders from the bottom up. A package imports packages of
// lower rows, of its own folder and, in internal, of rdma, whose interfaces it passes on.
// Folders of one row do not know each other.
var layers = [][]string{
	{"proto", "internal"},
	{"rdma"},
	{"slab"},
	{"alloc", "raw"},
	{"client", "controller", "storagenode"},
	{"btree"},
	{"gateway", "fsck"},
	{"coproc"}, // reads what the gateway has written
	{"verify"},
	{"cmd"},
	{"examples", "deploy"},
}

func layerOf(pkg string) (folder string, row int, ok bool) {
	folder, _, _ = strings.Cut(pkg, "/")
	for row, folders := range layers {
		if slices.Contains(folders, folder) {
			return folder, row, true
		}
	}
	return folder, 0, false
}

// allowed lists the arrows between folders that do not point down: helpers that describe
// messages or wrap the fabric's interfaces.
var allowed = map[string][]string{
	"internal": {"proto", "rdma"},
}

func TestImportsPointDown(t *testing.T) {
	for _, p := range modulePackages(t) {
		from, row, ok := layerOf(p.rel)
		if !ok {
			t.Errorf("package %s: folder %s has no row in layers", p.rel, from)
			continue
		}
		for _, imp := range p.Imports {
			rel, mine := strings.CutPrefix(imp, module+"/")
			if !mine {
				continue
			}
			to, below, ok := layerOf(rel)
			if !ok || from == to || below < row || slices.Contains(allowed[from], to) {
				continue
			}
			t.Errorf("%s imports %s: %s is not below %s", p.rel, rel, to, from)
		}
	}
}

// What checks the product is not part of it: only commands that run a check by hand
// (quarry bench, litmus, sim) import packages of verify.
func TestProductDoesNotImportItsChecks(t *testing.T) {
	byHand := []string{"verify/bench", "verify/litmus", "verify/sim"}
	for _, p := range modulePackages(t) {
		if folder, _, _ := layerOf(p.rel); folder == "verify" {
			continue
		}
		for _, imp := range p.Imports {
			rel, mine := strings.CutPrefix(imp, module+"/")
			if !mine || !strings.HasPrefix(rel, "verify/") {
				continue
			}
			if !strings.HasPrefix(p.rel, "cmd/") || !slices.Contains(byHand, rel) {
				t.Errorf("%s imports %s", p.rel, rel)
			}
		}
	}
}

// Import graphs of libraries that other programs embed stay small.
func TestImportGraphs(t *testing.T) {
	forbidden := map[string][]string{
		"client":      {"go.etcd.io/", "github.com/hashicorp/", "github.com/tetratelabs/wazero", "github.com/chromedp/", "github.com/apache/", module + "/controller", module + "/storagenode"},
		"btree/kv":    {"github.com/apache/"},
		"alloc":       {"net/http", "go.etcd.io/", "github.com/hashicorp/"},
		"controller":  {"go.etcd.io/etcd/server", module + "/internal/etcdembed", module + "/storagenode", module + "/client"},
		"storagenode": {"go.etcd.io/", module + "/controller", module + "/client"},
	}
	for _, p := range modulePackages(t) {
		for _, bad := range forbidden[p.rel] {
			for _, dep := range p.Deps {
				if dep == bad || strings.HasPrefix(dep, strings.TrimSuffix(bad, "/")+"/") {
					t.Errorf("%s depends on %s", p.rel, dep)
				}
			}
		}
	}
}

// Only the command may carry the etcd server.
func TestOnlyCmdEmbedsEtcd(t *testing.T) {
	for _, p := range modulePackages(t) {
		for _, imp := range p.Imports {
			if imp == module+"/internal/etcdembed" && !strings.HasPrefix(p.rel, "cmd/") && !strings.HasPrefix(p.rel, "verify/testcluster") {
				t.Errorf("%s imports internal/etcdembed; only cmd may", p.rel)
			}
		}
	}
}
