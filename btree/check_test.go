package btree

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCheckFindsDamage: each kind of damage to a tree of three levels, with layers and
// large values, is found and named.
func TestCheckFindsDamage(t *testing.T) {
	// change takes a node apart, has f damage it, and puts it back.
	change := func(s *stage, ref Ref, f func(n *node)) {
		b := s.w.slabs[ref.Addr]
		v, err := open(b.payload)
		require.NoError(s.t, err)
		n := v.node()
		f(n)
		b.payload = n.encode(nil, 0)
	}
	build := func(s *stage, p *Program) {
		s.key = long
		for i := range 400 {
			s.put(p, i, "value")
		}
		_, err := p.Put([]byte("key0000"), bytes.Repeat([]byte("v"), 1000), Cond{})
		require.NoError(s.t, err)
		s.want["key0000"] = string(bytes.Repeat([]byte("v"), 1000))
	}
	for what, damage := range map[string]func(s *stage, p *Program, leaf, inner *page){
		"a leaf is gone":        func(s *stage, _ *Program, leaf, _ *page) { require.NoError(s.t, s.st.Free(leaf.ref)) },
		"an inner node is gone": func(s *stage, _ *Program, _, inner *page) { require.NoError(s.t, s.st.Free(inner.ref)) },
		"a link to itself":      func(s *stage, _ *Program, leaf, _ *page) { change(s, leaf.ref, func(n *node) { n.right = leaf.ref }) },
		"a leaf skipped":        func(s *stage, p *Program, leaf, _ *page) { skip(s, p, leaf, change) },
		"a fence moved": func(s *stage, _ *Program, leaf, _ *page) {
			change(s, leaf.ref, func(n *node) { n.high = append(n.high, 'x') })
		},
		"entries out of order": func(s *stage, _ *Program, leaf, _ *page) {
			change(s, leaf.ref, func(n *node) { n.entries[0], n.entries[1] = n.entries[1], n.entries[0] })
		},
		"a version to come": func(s *stage, _ *Program, leaf, _ *page) {
			change(s, leaf.ref, func(n *node) { n.entries[0].version = n.stamp + 1 })
		},
		"an entry to the wrong": func(s *stage, _ *Program, _, inner *page) {
			change(s, inner.ref, func(n *node) { n.entries[0].child = n.entries[1].child })
		},
		"a level too many": func(s *stage, p *Program, _, inner *page) {
			change(s, inner.ref, func(n *node) { n.entries[1].child = p.root })
		},
		"a large value is gone":  func(s *stage, p *Program, _, _ *page) { freeTagged(s, TagValue) },
		"a layer is gone":        func(s *stage, p *Program, _, _ *page) { freeTagged(s, TagLayer) },
		"bytes that are no node": func(s *stage, _ *Program, leaf, _ *page) { s.w.slabs[leaf.ref.Addr].payload[0] ^= 0xff },
		"a length too long": func(s *stage, _ *Program, leaf, _ *page) {
			b := s.w.slabs[leaf.ref.Addr]
			b.payload = b.payload[:len(b.payload)-1]
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := newStage(t, build)
			p := s.client(false)
			p.begin()
			leaf, err := p.find(probe{key: key4(122)}, 0)
			require.NoError(t, err)
			inner, err := p.find(probe{key: key4(122)}, 1)
			require.NoError(t, err)
			require.NotEqual(t, p.root, inner.ref, "the tree has three levels")
			require.True(t, leaf.bounded() && leaf.count > 1 && inner.count > 2)
			damage(s, p, leaf, inner)
			_, err = Check(s.st, s.root, nil)
			require.Error(t, err)
			t.Logf("%.150s", err.Error())
		})
	}
}

// skip makes a leaf's right link lead past its neighbour.
func skip(s *stage, p *Program, leaf *page, change func(*stage, Ref, func(*node))) {
	next, err := p.read(leaf.right)
	require.NoError(s.t, err)
	right := next.right
	change(s, leaf.ref, func(n *node) { n.right = right })
}

// freeTagged frees an object with a tag.
func freeTagged(s *stage, tag uint32) {
	for _, b := range s.w.slabs {
		if b.live && b.tag == tag {
			require.NoError(s.t, s.st.Free(b.ref))
			return
		}
	}
	require.Fail(s.t, "no such object")
}
