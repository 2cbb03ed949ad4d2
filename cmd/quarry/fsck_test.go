package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/fsck"
)

// A check that has not seen everything fails, whatever it has found in the rest; what it has
// found decides the exit code.
func TestFsckOutcome(t *testing.T) {
	finding := fsck.Finding{Region: 1, Where: "block 2", Kind: fsck.KindMap, What: "bit 3 is clear"}
	region := fsck.Unchecked{Region: 2, State: "unavailable", Why: "it can be checked once it is open"}
	tree := treeView{Name: "orders", Unchecked: "node n1 cannot be reached"}
	for _, c := range []struct {
		rep   fsck.Report
		trees []treeView
		code  int
		says  []string
	}{
		{fsck.Report{}, nil, exitOK, nil},
		{fsck.Report{Findings: []fsck.Finding{finding}}, nil, exitDamaged, []string{"1 findings", finding.String()}},
		{fsck.Report{Unchecked: []fsck.Unchecked{region}}, nil, exitUnreachable, []string{region.String()}},
		{fsck.Report{Unchecked: []fsck.Unchecked{region}}, []treeView{tree}, exitUnreachable, []string{"2 regions and trees", region.String()}},
		{fsck.Report{Findings: []fsck.Finding{finding}, Unchecked: []fsck.Unchecked{region}}, nil, exitDamaged, []string{finding.String(), region.String()}},
	} {
		v := fsckView{Report: &c.rep, Trees: c.trees}
		err := v.outcome()
		if c.code == exitOK {
			require.NoError(t, err)
			continue
		}
		require.Equal(t, c.code, exitCode(err), "%v", err)
		for _, s := range c.says {
			require.ErrorContains(t, err, s)
		}
		var out bytes.Buffer
		v.print(&out)
		require.NotContains(t, out.String(), "no findings\n")
		for _, u := range c.rep.Unchecked {
			require.Contains(t, out.String(), u.String())
		}
	}
}
