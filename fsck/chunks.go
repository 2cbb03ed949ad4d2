package fsck

import (
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// indexHeaderBytes precede the references in an index slab: bytes:8 | chunk bytes:8.
const indexHeaderBytes = 16

// chunkRefs are the chunks that an index names.
func chunkRefs(payload []byte) []proto.Ref {
	var refs []proto.Ref
	for at := indexHeaderBytes; at+proto.RefBytes <= len(payload); at += proto.RefBytes {
		refs = append(refs, proto.DecodeRef(payload[at:]))
	}
	return refs
}

// chunks matches indexes with chunks. Both were read at different moments, so what does
// not match is looked at once more.
func (c *check) chunks(works []*work) error {
	for _, x := range c.indexes {
		for _, ref := range x.chunks {
			if k := c.live[ref]; k != nil {
				k.named = true
				continue
			}
			if _, there, err := c.isLive(works, ref); err != nil {
				return err
			} else if there {
				continue // born after its block was read
			}
			// A chunk is freed after its index has changed. An index that names one that is
			// gone, and has not changed since, is damaged, also beside other clients.
			version, still, err := c.isLive(works, x.ref)
			if err != nil {
				return err
			}
			if !still || version != x.version {
				x.w.stat.Busy++ // the object has been changed or freed meanwhile
				continue
			}
			c.find(x.w, -1, KindChunk, x.ref.String(), "its chunk %v is not there", ref)
		}
	}
	unnamed := map[*work]int{}
	for ref, k := range c.live {
		if !k.named {
			unnamed[workOf(works, ref)]++
		}
	}
	if len(unnamed) == 0 {
		return nil
	}
	orphans, done, err := slab.Orphans(&survey{c, works})
	if err != nil {
		return err
	}
	if !done {
		orphans = nil // nothing can be said of them now
	}
	for _, o := range orphans {
		w := workOf(works, o.Ref)
		unnamed[w]--
		if _, there, err := c.isLive(works, o.Ref); err != nil {
			return err
		} else if !there {
			continue
		}
		f := c.finding(w, -1, KindLeak, o.Ref.String(), "a chunk that no object names, of a session that is over")
		f.ref, f.version, f.chunk = o.Ref, o.Version, true
		c.report.add(f)
	}
	for w, n := range unnamed {
		w.stat.Pending += n
	}
	return nil
}

// workOf is the check of the region that a reference is in; nil: it is not checked.
func workOf(works []*work, ref proto.Ref) *work {
	if i := slices.IndexFunc(works, func(w *work) bool { return w.ID == ref.Addr.Region() }); i >= 0 {
		return works[i]
	}
	return nil
}

// survey is the slab.Survey of the chunks of large objects.
type survey struct {
	c     *check
	works []*work
}

// Objects tells the chunks that the check has met and no index that it has met names.
func (s *survey) Objects(saw func(slab.Seen)) error {
	for ref, k := range s.c.live {
		if !k.named {
			saw(slab.Seen{Ref: ref, Tag: proto.TagChunk, Version: k.version, Writer: k.writer})
		}
	}
	return nil
}

func (s *survey) Sessions() (func(uint32) slab.SessionState, error) { return s.c.o.Sessions() }

// Named reads every index once more. It cannot say that it has met all where the check has found that some may be hidden.
func (s *survey) Named(met func(proto.Ref)) (whole bool, err error) {
	if s.c.report.Hidden() != nil {
		return false, nil
	}
	if whole, err = s.c.o.Complete(); err != nil || !whole {
		return false, err
	}
	for _, w := range s.works {
		if whole, err = s.c.inUse(w); err != nil || !whole {
			return false, err
		}
		for _, b := range w.used {
			if whole, err = s.c.indexesOf(w, b, met); err != nil || !whole {
				return false, err
			}
		}
	}
	return true, nil
}

// inUse lists the blocks that are in use now. whole is false if the header of a block is damaged: indexes may lie there.
func (c *check) inUse(w *work) (whole bool, err error) {
	c.round.Reset()
	c.round.Chain(w.Replicas[0]).Read(w.g.HeaderOff(0), c.small[0][:8*int(w.g.Blocks)])
	if err := c.do(w); err != nil {
		return false, err
	}
	w.used = w.used[:0]
	for b := range w.g.Blocks {
		h := proto.Header(proto.Word(c.small[0], 8*int(b)))
		if !h.Valid() {
			return false, nil
		}
		if h.State() != proto.BlockFree {
			w.used = append(w.used, b)
		}
	}
	return true, nil
}

// indexesOf tells the chunks that the indexes of a block name. whole is false if an
// object kept changing.
func (c *check) indexesOf(w *work, b uint32, met func(proto.Ref)) (whole bool, err error) {
	for attempt := 1; attempt <= looks; attempt++ {
		if attempt > 1 {
			c.o.Pause(attempt - 1)
		}
		c.round.Reset()
		ch := c.round.Chain(w.Replicas[0])
		ch.Read(w.g.HeaderOff(b), c.words[:8])
		ch.Read(w.g.BlockOff(b), c.blocks[0])
		if err := c.do(w); err != nil {
			return false, err
		}
		h := proto.Header(proto.Word(c.words, 0))
		if !h.Valid() {
			return false, nil
		}
		if !h.State().Open() {
			return true, nil // a block that is being formatted or reclaimed has no objects
		}
		size, torn := h.Class().Bytes(), 0
		for i := range h.Class().Slabs() {
			s, bytes := w.g.Slab(b, i, h), c.blocks[0][i*size:(i+1)*size]
			_, v := s.Words(bytes)
			if !v.Valid() {
				torn++ // open, it may be put back, and then another image names its chunks; damaged, a failover may go by another one
				continue
			}
			if v.State() == proto.StateBad {
				return false, nil // it may have been an index: its chunks are kept until the mark is taken away
			}
			if v.State() != proto.StateLive {
				continue
			}
			if err := c.readShadow(w, w.Replicas[0], s, h.Generation(), bytes); err != nil {
				return false, err
			}
			img, payload, ok := proto.DecodeImage(s.Image(bytes, v.Version()), proto.Seed(w.seed, s.Off, h.Generation()))
			if ok {
				img.Tag, payload, ok = proto.Inner(img.Tag, payload)
			}
			switch {
			case !ok || img.Version != v.Version():
				torn++
			case img.Tag&proto.TagIndex != 0:
				for _, ref := range chunkRefs(payload) {
					met(ref)
				}
			}
		}
		if torn == 0 {
			return true, nil
		}
	}
	return false, nil
}

// isLive reads whether a reference names a LIVE slab at this moment, and the version of
// the object. References into regions that are not checked count as live.
func (c *check) isLive(works []*work, ref proto.Ref) (version uint64, live bool, err error) {
	w := workOf(works, ref)
	if w == nil {
		return 0, true, nil
	}
	b, ok := w.g.BlockOf(uint64(ref.Addr.Off()))
	if !ok {
		return 0, false, nil
	}
	c.round.Reset()
	c.round.Chain(w.Replicas[0]).Read(w.g.HeaderOff(b), c.words[:8])
	if err := c.do(w); err != nil {
		return 0, false, err
	}
	h := proto.Header(proto.Word(c.words, 0))
	if !h.Valid() || !h.State().Open() || h.Generation() != ref.Incarnation.Generation() {
		return 0, false, nil
	}
	n, ok := w.g.SlabIndex(uint64(ref.Addr.Off()), h.Class())
	if !ok {
		return 0, false, nil
	}
	s := w.g.Slab(b, n, h)
	buf := c.blocks[0][:h.Class().Bytes()]
	c.round.Reset()
	c.round.Chain(w.Replicas[0]).Read(s.Off, buf)
	if err := c.do(w); err != nil {
		return 0, false, err
	}
	_, v := s.Words(buf)
	img := proto.ParseImageHeader(s.Image(buf, v.Version()))
	return v.Version(), v.State() == proto.StateLive && img.Born == ref.Incarnation.Born(), nil
}
