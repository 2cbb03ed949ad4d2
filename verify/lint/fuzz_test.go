package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// parsers are the forms in which bytes come from other processes, memory or files, and the fuzz
// target of each. verify/fuzz/run.sh finds the targets in the sources and fails for one that does not run.
var parsers = map[string]string{
	"hello of tcp, shm and verbs":    "rdma/host FuzzHello",
	"messages of tcp":                "rdma/tcp FuzzFrame",
	"messages of verbs":              "rdma/verbs FuzzMessages",
	"messages of a mailbox":          "rdma/msg FuzzMessage",
	"ticket":                         "rdma FuzzTicket",
	"RESP":                           "gateway/redis FuzzParser",
	"records of Redis values":        "gateway/redis FuzzRecords",
	"image of a slab":                "proto FuzzDecodeImage",
	"words and headers of blocks":    "proto FuzzWords",
	"records of staged slabs":        "proto FuzzRecord",
	"header of a region":             "proto FuzzDecodeRegionHeader",
	"node of a tree":                 "btree FuzzNode",
	"uploaded WASM module":           "coproc/job FuzzModule",
	"what a WASM module writes":      "coproc/job FuzzGuest",
	"frames of jobs":                 "coproc FuzzCutFrame",
	"records of jobs":                "coproc FuzzCutRecord",
	"table of a controller":          "internal/table FuzzMerge",
	"datagrams of the pulse":         "internal/pulse FuzzDatagram",
	"what a storage node has kept":   "storagenode/state FuzzDecodeKept",
	"files of quarry kv load":        "cmd/quarry/kvfile FuzzReader",
	"references in texts":            "proto FuzzParseRef",
	"patterns of the Redis commands": "gateway/redis FuzzMatch",
	"messages of Flight":             "gateway/flight FuzzIncoming",
	"commands of Flight":             "gateway/flight FuzzCommand",
	"poolset files":                  "client/pool FuzzParseSet",
	"headers of local parts":         "client/pool FuzzPartHead",
	"requests to pool agents":        "client/pool FuzzRequest",
	"what a pool's host writes":      "client/pool FuzzAnswers",
	"tickets of Flight":              "gateway/flight FuzzTicket",
}

var fuzzTarget = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// TestParsersAreFuzzed: each form has its fuzz target.
func TestParsersAreFuzzed(t *testing.T) {
	for form, target := range parsers {
		folder, name, _ := strings.Cut(target, " ")
		files, err := filepath.Glob(filepath.Join("..", "..", folder, "*_test.go"))
		require.NoError(t, err)
		found := false
		for _, file := range files {
			src, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, m := range fuzzTarget.FindAllSubmatch(src, -1) {
				found = found || string(m[1]) == name
			}
		}
		require.True(t, found, "%s: no func %s in %s: add it, or correct the list", form, name, folder)
	}
}
