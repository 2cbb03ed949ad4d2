package storagenode_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/storagenode"
)

const aheadRegion = 16 << 20 // as hostReq has it

// A node has its region files read from its start on, before a controller asks for any.
func TestRegionsAreReadFromTheStart(t *testing.T) {
	dir := t.TempDir()
	if fs, err := host.FileSystemOf(dir); err != nil || fs.Volatile != nil {
		t.Skip("folders of tests are not on a disk: the page cache is all there is")
	}
	b := newBoss(t)
	n := b.startAs(1, dir)
	b.hostAndOpen(n, 1, 1)
	b.hostAndOpen(n, 2, 1)
	require.Zero(t, n.Stats().ReadAheadBytes, "regions that are made are in the cache")
	require.NoError(t, n.Close())
	names, err := filepath.Glob(filepath.Join(dir, "region-*"))
	require.NoError(t, err)
	require.Len(t, names, 2)
	for _, name := range names {
		f, err := os.Open(name)
		require.NoError(t, err)
		require.NoError(t, f.Sync())
		require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		require.NoError(t, f.Close())
	}
	n = b.startAs(2, dir)
	require.Eventually(t, func() bool { return n.Stats().ReadAheadBytes == 2*aheadRegion }, patience, time.Millisecond, "no region is open")
	before, after := n.ReconcileAhead(t.Context(), 2)
	require.True(t, before)
	require.False(t, after, "reconciles have the disk to themselves")
	require.EqualValues(t, 3*aheadRegion, n.Stats().ReadAheadBytes, "and read by themselves")
	n.ReconcileAhead(t.Context(), 9)
	require.EqualValues(t, 3*aheadRegion, n.Stats().ReadAheadBytes, "no such region")
	memory := b.start(b.config(""))
	require.Zero(t, memory.Stats().ReadAheadBytes, "of memory there is nothing to read")
}

// What is read at the start is bounded, and ends with its context.
func TestReadingAheadIsBounded(t *testing.T) {
	var memories []*host.Memory
	for _, name := range []string{"1", "2", "3"} {
		m, err := host.OpenMemory(filepath.Join(t.TempDir(), name), aheadRegion, true)
		require.NoError(t, err)
		defer m.Close()
		if !m.Persistent() {
			t.Skip("folders of tests are not on a disk: the page cache is all there is")
		}
		memories = append(memories, m)
	}
	require.EqualValues(t, aheadRegion+5<<20, storagenode.ReadAhead(t.Context(), memories, aheadRegion+5<<20))
	require.EqualValues(t, 3*aheadRegion, storagenode.ReadAhead(t.Context(), memories, 1<<40))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.Zero(t, storagenode.ReadAhead(ended, memories, 1<<40))
}
