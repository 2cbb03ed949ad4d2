package fsck_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// In a region with open words a late settle of a backup is no fault, nor is a word that its holder has open; an open word
// that nobody holds is one. Elsewhere any open word is.
func TestOpenWords(t *testing.T) {
	for _, c := range []struct {
		name      string
		openWords bool
		replica   int
		held      bool
		want      fsck.Kind
	}{
		{"late settle", true, 1, false, ""},
		{"under change", true, 0, true, ""},
		{"left open", true, 0, false, fsck.KindWord},
		{"not a region for it", false, 0, true, fsck.KindWord},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			require.NoError(t, w.port.Alloc.Close())
			s, _, _ := w.slab(t, w.refs[2])
			_, v := s.Words(w.read(t, c.replica, s.Off, s.Class.Bytes()))
			b := make([]byte, 8)
			proto.PutWord(b, 0, uint64(v.Open()))
			w.write(t, c.replica, s.VOff(), b)
			if c.held {
				proto.PutWord(b, 0, uint64(proto.MakeR(7, 1)))
				w.write(t, 0, s.ROff(), b)
			}
			rep, err := fsck.Regions(t.Context(), []fsck.Region{{ID: 1, UUID: uuid, Epoch: 1, Bytes: proto.MinRegionBytes, OpenWords: c.openWords,
				Replicas: []*rdma.Target{w.target(t, 0), w.target(t, 1)}, Nodes: []string{"n1", "n2"}}},
				fsck.Options{Session: func(uint32) fsck.SessionState { return slab.SessionLive }})
			require.NoError(t, err)
			if c.want == "" {
				require.Empty(t, rep.Findings)
				return
			}
			require.Len(t, rep.Findings, 1)
			require.Equal(t, c.want, rep.Findings[0].Kind)
		})
	}
}
