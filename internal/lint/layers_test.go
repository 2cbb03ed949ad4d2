package lint

import (
	"strings"
	"testing"
)

// layers orders the packages; an import points to a lower layer or stays within
// one prefix. The longest prefix counts. A new package needs a line here: that is
// the moment to think about where it belongs.
var layers = map[string]int{
	"proto":                    0,
	"proto/quarrypb":           1,
	"internal/clock":           0,
	"internal/latency":         0,
	"internal/member":          5,
	"internal/control":         5,
	"internal/rpcstats":        1,
	"internal/table":           2,
	"rdma":                     10,
	"rdma/host":                11,
	"rdma/rdmatest":            13,
	"rdma/tcp":                 12,
	"rdma/shm":                 12,
	"rdma/sim":                 12,
	"rdma/verbs":               12,
	"internal/slab":            20,
	"alloc":                    30,
	"client":                   40,
	"controller":               40,
	"storagenode":              40,
	"btree":                    50,
	"coproc":                   60,
	"coproc/job":               65, // reads what the gateway has written
	"coproc/worker":            70,
	"internal/resp":            60,
	"internal/fsck":            50,
	"internal/kvfile":          50,
	"internal/bench":           70,
	"internal/litmus":          60,
	"internal/demo":            70,
	"cmd":                      100,
	"examples":                 100,
	"internal/sim":             60,
	"internal/local":           60,
	"internal/chaos":           80,
	"internal/slabtest":        60,
	"internal/metrics":         5,
	"client/prom":              45,
	"internal/metrics/trees":   60,
	"internal/metrics/collect": 80,
	"deploy":                   100,
	"internal/doctor":          60,
	"internal/console":         70,
	"internal/dist":            100,
	"internal/deploytest":      100,
	"internal/lint":            100,
	"internal/models":          100,
	"internal/rxevm":           100,

	"internal/agentauth": 2,
	"internal/etcdembed": 90,
	// Harnesses start whole clusters for tests; nothing but tests imports them.
	"internal/testcluster": 95,
}

func layerOf(pkg string) (prefix string, layer int, ok bool) {
	for p := pkg; ; {
		if l, ok := layers[p]; ok {
			return p, l, true
		}
		i := strings.LastIndexByte(p, '/')
		if i < 0 {
			return "", 0, false
		}
		p = p[:i]
	}
}

func TestImportsPointDown(t *testing.T) {
	for _, p := range modulePackages(t) {
		from, layer, ok := layerOf(p.rel)
		if !ok {
			t.Errorf("package %s has no layer: give it a line in internal/lint/layers_test.go", p.rel)
			continue
		}
		for _, imp := range p.Imports {
			rel, mine := strings.CutPrefix(imp, module+"/")
			if !mine {
				continue
			}
			to, below, ok := layerOf(rel)
			if ok && from != to && below >= layer {
				t.Errorf("%s imports %s: layer %d may not import layer %d; arrows point down only", p.rel, rel, layer, below)
			}
		}
	}
}

// Import graphs of libraries that other programs embed stay small.
func TestImportGraphs(t *testing.T) {
	forbidden := map[string][]string{
		"client":      {"go.etcd.io/", "github.com/hashicorp/", "github.com/tetratelabs/wazero", "github.com/chromedp/", module + "/controller", module + "/storagenode"},
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
			if imp == module+"/internal/etcdembed" && !strings.HasPrefix(p.rel, "cmd/") && !strings.HasPrefix(p.rel, "internal/testcluster") {
				t.Errorf("%s imports internal/etcdembed; only cmd may", p.rel)
			}
		}
	}
}
