package storagenode_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
)

// A reconcile has all of its region's file read ahead, which is counted, until it ends.
func TestReconcilesReadAhead(t *testing.T) {
	dir := t.TempDir()
	if fs, err := host.FileSystemOf(dir); err != nil || fs.Volatile != nil {
		t.Skip("folders of tests are not on a disk: the page cache is all there is")
	}
	b := newBoss(t)
	n := b.startAs(1, dir)
	b.hostAndOpen(n, 1, 1)
	require.Zero(t, n.Stats().ReadAheadBytes)
	n.ReadAhead(t.Context(), 1)
	require.EqualValues(t, 16<<20, n.Stats().ReadAheadBytes)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	n.ReadAhead(ended, 1)
	n.ReadAhead(t.Context(), 9) // no such region
	require.EqualValues(t, 16<<20, n.Stats().ReadAheadBytes)
	memory := newBoss(t)
	m := memory.start(memory.config(""))
	memory.hostAndOpen(m, 1, 1)
	m.ReadAhead(t.Context(), 1)
	require.Zero(t, m.Stats().ReadAheadBytes, "of memory there is nothing to read")
}
