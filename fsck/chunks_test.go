package fsck_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// chunksOf makes chunks that no index names.
func (w *world) chunksOf(t *testing.T, n int) (refs []proto.Ref) {
	for i := range n {
		ref, err := w.port.Alloc.Alloc(make([]byte, 1000+i), alloc.Want{Kind: proto.Single, Replicas: 2, Tag: proto.TagChunk})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	return refs
}

// index names chunks.
func (w *world) index(t *testing.T, refs []proto.Ref) proto.Ref {
	b := make([]byte, 16)
	for _, r := range refs {
		b, _ = r.AppendBinary(b)
	}
	ref, err := w.port.Alloc.Alloc(b, alloc.Want{Kind: proto.Pair, Replicas: 2, Tag: proto.TagIndex})
	require.NoError(t, err)
	return ref
}

// TestUnnamedChunks: chunks without an index are a leak exactly when their session is
// over, whether others can write or not.
func TestUnnamedChunks(t *testing.T) {
	w := newWorld(t)
	refs := w.chunksOf(t, 13)
	for _, writers := range []bool{false, true} {
		for s := slab.SessionGone; s <= slab.SessionFenced; s++ {
			t.Run(fmt.Sprint(s, writers), func(t *testing.T) {
				rep := w.check(t, fsck.Options{Writers: func() bool { return writers }, Sessions: func() (func(uint32) slab.SessionState, error) {
					return func(uint32) slab.SessionState { return s }, nil
				}})
				if s.Over() {
					require.Len(t, rep.Findings, len(refs))
					require.Equal(t, fsck.KindLeak, rep.Findings[0].Kind)
					require.Zero(t, rep.Regions[0].Pending)
					return
				}
				require.Empty(t, rep.Findings)
				require.Equal(t, len(refs), rep.Regions[0].Pending)
			})
		}
	}
	// Some regions are not checked, so an index may be there.
	rep := w.check(t, fsck.Options{Complete: func() (bool, error) { return false, nil }, Sessions: func() (func(uint32) slab.SessionState, error) {
		return func(uint32) slab.SessionState { return slab.SessionGone }, nil
	}})
	require.Empty(t, rep.Findings)
	require.Equal(t, len(refs), rep.Regions[0].Pending)
}

// TestIndexComesDuringTheCheck: the writer commits its index after the check has passed
// the index's place, and closes its session.
func TestIndexComesDuringTheCheck(t *testing.T) {
	w := newWorld(t)
	refs := w.chunksOf(t, 13)
	named := false
	rep := w.check(t, fsck.Options{Sessions: func() (func(uint32) slab.SessionState, error) {
		if !named {
			named = true
			w.index(t, refs)
		}
		return func(uint32) slab.SessionState { return slab.SessionGone }, nil
	}})
	require.True(t, named)
	require.Empty(t, rep.Findings)
}

// TestChunkIsGone: an index that names a chunk that is not there, and does not change, is
// a finding although others can write.
func TestChunkIsGone(t *testing.T) {
	w := newWorld(t)
	refs := w.chunksOf(t, 3)
	index := w.index(t, refs)
	_, _, err := w.port.Alloc.Free(refs[1])
	require.NoError(t, err)
	rep := w.check(t, fsck.Options{Writers: func() bool { return true }})
	require.Len(t, rep.Findings, 1)
	require.Equal(t, fsck.KindChunk, rep.Findings[0].Kind)
	require.Equal(t, index.String(), rep.Findings[0].Where)
}

// TestRepairKeepsTheWriter: who mends an object does not become its writer. Its maker may
// still name it, and the orphan rule would take the mender's session for the maker's.
func TestRepairKeepsTheWriter(t *testing.T) {
	w := newWorld(t)
	mender := w.Lane(6)
	writers := func() map[proto.Ref]uint32 {
		out := map[proto.Ref]uint32{}
		w.check(t, fsck.Options{Object: func(o fsck.Object) { out[o.Ref] = o.Writer }})
		return out
	}
	for node, ref := range w.refs[50:52] { // a pair and one that is written once
		for n := range 2 {
			s, _, _ := w.slab(t, ref)
			_, v := s.Words(w.read(t, n, s.Off, s.Class.Bytes()))
			at := s.ImageOff(v.Version()) + 40
			b := w.read(t, n, at, 8)
			b[3] ^= 4
			w.write(t, n, at, b)
			require.NoError(t, mender.Lane.RepairAll(ref), "node %d", node)
			require.Equal(t, uint32(5), writers()[ref])
		}
	}
}
