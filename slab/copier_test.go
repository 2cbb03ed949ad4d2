package slab_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

// TestDamagedImageEndsNoRebuild: the only image in sync of one object is damaged. The rebuild
// copies all others, and that object is known to be damaged at the new replica too.
func TestDamagedImageEndsNoRebuild(t *testing.T) {
	w := slabtest.New(t, 2)
	p, agent := w.Lane(1), w.Lane(2)
	var refs []proto.Ref
	for _, text := range []string{"before", "damaged", "behind"} {
		ref, err := p.Alloc.Alloc([]byte(text), alloc.Want{Kind: proto.Pair, Replicas: 2})
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	agent.Rebuild(1)
	memory := w.Nodes[0].Memory.Bytes()
	at := bytes.Index(memory, []byte("damaged"))
	require.Positive(t, at)
	memory[at] ^= 1

	reg, err := agent.Region(1)
	require.NoError(t, err)
	block, ok := w.Geometry.BlockOf(uint64(refs[0].Addr.Off()))
	require.True(t, ok)
	var st slab.Copied
	require.NoError(t, agent.Lane.CopyBlock(reg, block, &st))
	require.Equal(t, 3, st.Images)
	require.Equal(t, 1, st.Bad)

	copied := w.Nodes[1].Memory.Bytes()
	for _, text := range []string{"before", "behind"} {
		require.Equal(t, bytes.Index(memory, []byte(text)), bytes.Index(copied, []byte(text)), text)
	}
	_, _, err = p.Lane.Read(refs[1], nil)
	require.ErrorIs(t, err, slab.ErrCorrupt, "from any replica")
	require.ErrorIs(t, p.Lane.Repair(refs[1]), slab.ErrCorrupt)
	got, _, err := p.Lane.Read(refs[2], nil)
	require.NoError(t, err)
	require.Equal(t, "behind", string(got))
}
