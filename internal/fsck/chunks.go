package fsck

import (
	"slices"

	"github.com/quarrystore/quarry/proto"
)

// indexHeaderBytes precede the references in an index slab: bytes:8 | chunk bytes:8.
const indexHeaderBytes = 16

func chunkRefs(payload []byte) []proto.Ref {
	var refs []proto.Ref
	for at := indexHeaderBytes; at+proto.RefBytes <= len(payload); at += proto.RefBytes {
		refs = append(refs, proto.DecodeRef(payload[at:]))
	}
	return refs
}

// chunks matches indexes with chunks. Both were read at different moments, so
// what does not match is looked up once more.
func (c *check) chunks(works []*work) error {
	for _, x := range c.indexes {
		for _, ref := range x.chunks {
			if _, ok := c.live[ref]; ok {
				c.live[ref] = true
				continue
			}
			there, err := c.isLive(works, ref)
			if err != nil {
				return err
			}
			if there {
				continue // born after its block was read
			}
			if still, err := c.isLive(works, x.ref); err != nil {
				return err
			} else if !still || c.o.Writers() {
				x.w.stat.Busy++ // the object has been changed or freed meanwhile
				continue
			}
			c.find(x.w, -1, KindChunk, x.ref.String(), "its chunk %v is not there", ref)
		}
	}
	var orphans []proto.Ref
	for ref, named := range c.live {
		if !named {
			orphans = append(orphans, ref)
		}
	}
	slices.SortFunc(orphans, func(a, b proto.Ref) int { return int(int64(a.Addr) - int64(b.Addr)) })
	for _, ref := range orphans {
		w := works[slices.IndexFunc(works, func(w *work) bool { return w.ID == ref.Addr.Region() })]
		if there, err := c.isLive(works, ref); err != nil {
			return err
		} else if !there {
			continue
		}
		if c.o.Writers() {
			w.stat.Pending++
			continue
		}
		f := c.finding(w, -1, KindLeak, ref.String(), "a chunk that no object names")
		f.ref, f.chunk = ref, true
		c.report.add(f)
	}
	return nil
}

// isLive reads whether a reference names a LIVE slab at this moment. References
// into regions that are not checked count as live.
func (c *check) isLive(works []*work, ref proto.Ref) (bool, error) {
	i := slices.IndexFunc(works, func(w *work) bool { return w.ID == ref.Addr.Region() })
	if i < 0 {
		return true, nil
	}
	w := works[i]
	b, ok := w.g.BlockOf(uint64(ref.Addr.Off()))
	if !ok {
		return false, nil
	}
	c.round.Reset()
	c.round.Chain(w.Replicas[0]).Read(w.g.HeaderOff(b), c.words[:8])
	if err := c.do(w); err != nil {
		return false, err
	}
	h := proto.Header(proto.Word(c.words, 0))
	if !h.Valid() || !h.State().Open() || h.Generation() != ref.Life.Generation() {
		return false, nil
	}
	n, ok := w.g.SlabIndex(uint64(ref.Addr.Off()), h.Class())
	if !ok {
		return false, nil
	}
	s := w.g.Slab(b, n, h)
	buf := c.blocks[0][:h.Class().Bytes()]
	c.round.Reset()
	c.round.Chain(w.Replicas[0]).Read(s.Off, buf)
	if err := c.do(w); err != nil {
		return false, err
	}
	_, v := s.Words(buf)
	img := proto.ParseImageHeader(s.Image(buf, v.Version()))
	return v.State() == proto.StateLive && img.Born == ref.Life.Born(), nil
}
